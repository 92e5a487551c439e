"""Parts that all commands share: settings, command line, folders of runs, processes, progress."""
