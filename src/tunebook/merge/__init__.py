"""An adapter put into its base, and the proof that the merged model says the same."""
