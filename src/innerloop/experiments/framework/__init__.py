"""What commands share: settings, command line, folders of runs, processes, progress."""
