"""Other projects' interfaces: `skyrl` (their environments here), `trl` and `gem` (ours there)."""
