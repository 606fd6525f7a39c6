"""combine_routes by warps."""
