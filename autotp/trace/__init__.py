"""Capture: an `nn.Module`'s real forward, recorded on fake tensors into a `torch.fx.Graph`."""
