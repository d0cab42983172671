def conversations(r,n): return []
