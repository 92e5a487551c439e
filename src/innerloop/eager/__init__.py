"""The paper's own interface: innerloop_ctx, monkeypatch, differentiable optimizers."""
