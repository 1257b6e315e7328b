"""What plugs ZeroFP4 into other frameworks, one file or folder each; nothing else here imports them."""
