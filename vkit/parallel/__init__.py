"""One model in several processes: rank 0 plans, samples and answers; the others run what it sends."""
