"""What plugs ZeroFP4 into other frameworks; nothing else here imports them."""
