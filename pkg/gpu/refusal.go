package gpu

// RefusedError says that a claim can't be given its devices because of their silicon: the
// hardware refuses what has to be done for them, or something that nobody but an admin can
// change is in the way. It isn't for a GPU that is lost or doesn't answer, nor for what the
// node's other GPUs would refuse too.
type RefusedError struct {
	// Silicon is what can't be given: a Whole or a Partition; several if one of them is to
	// blame, and it isn't known which.
	Silicon []Device
	// Action is what can't be done, and completes "the GPU can't": "create a 3g.40gb partition".
	Action string
	// Err is the reason.
	Err error
}

func (e *RefusedError) Error() string { return e.Err.Error() }

func (e *RefusedError) Unwrap() error { return e.Err }
