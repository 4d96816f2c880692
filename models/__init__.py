"""Things done to any network: load it, choose what trains, fit it into memory, read its latents, write it out."""
