"""The summation service beside gloo."""
