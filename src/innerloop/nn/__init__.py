"""Layers whose second derivatives are exact and cheap; a replica uses them in torch's place."""

from innerloop.nn.batch_norm import batch_norm as batch_norm
