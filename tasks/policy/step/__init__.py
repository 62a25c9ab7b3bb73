"""One optimizer step: what is read of a micro-batch, its loss, the gradient of all ranks, AdamW."""
