"""What a trained model is for: its forward pass by itself, in a folder that needs none of its code, and ensembles of such."""
