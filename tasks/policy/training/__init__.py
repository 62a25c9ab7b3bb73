"""One policy update on all ranks, from a published version to the shards of a candidate."""
