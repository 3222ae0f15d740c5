"""Documents that say the same: exact, near, by URL, by paragraph."""
