"""Process groups that span sites: gloo or NCCL inside of each, authenticated links between their leaders."""
