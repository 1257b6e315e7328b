"""What tests of several rooms draw from: models, options, shapes and values."""
