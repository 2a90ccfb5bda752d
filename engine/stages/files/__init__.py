"""Reading of stages from model folders, and exports into folders."""
