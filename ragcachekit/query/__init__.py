"""Was a near-identical question answered by the index before? (Proximity)"""
