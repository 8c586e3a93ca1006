"""`roadtrain doctor`: examine this machine before training, name what is wrong, and say how to fix
it.

Every check is a plain function that takes a Subject and yields Diagnoses; `doctor_command.py` has
the table of checks. Nothing on the machine is changed: measurements use files that are removed
while they are open. The command ends within 10 s, even if a disk, a server or a device hangs. Read
`doctor_command.py` first.
"""
