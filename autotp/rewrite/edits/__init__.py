"""Call-site edits: copies of the model's functions in which single expressions are wrapped.

    guided trace ──► find (which expression) ──► Edit (data) ──► bind (compile, subclass) ──► dual trace

`view(b, s, self.num_heads, d)` becomes `view(b, s, local(self.num_heads), d)`. The rest stays the model's
own live Python.
"""
