"""Every private name of torch that apsched uses, behind one door."""
