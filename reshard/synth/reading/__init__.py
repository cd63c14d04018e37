"""Who reads what: the layout "as read" of each stored tensor, tensors packed together, and waves."""
