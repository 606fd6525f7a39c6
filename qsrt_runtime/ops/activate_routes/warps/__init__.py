"""activate_routes by warps."""
