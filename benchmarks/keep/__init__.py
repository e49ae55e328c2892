"""The gain from gathered parameters that are kept from forward to backward, by cluster and memory
cap.
"""
