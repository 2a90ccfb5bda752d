"""Process groups that span sites: gloo or NCCL inside each site, authenticated links between the sites' leaders."""
