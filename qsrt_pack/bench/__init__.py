"""How fast a layer runs on this GPU, packed and in bfloat16."""
