"""roadtrain under the interfaces of others: DDP's communication hook, Horovod's optimizer and
calls."""
