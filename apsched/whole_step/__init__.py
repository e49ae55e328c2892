"""Forward and backward as one problem: which parameters are kept in between, under one memory
cap.
"""
