package failpoint

// Steps are told of the steps that a part comes to. Nil, they do nothing.
type Steps struct{ reached func(step string) }

// Call returns Steps that call f, for tests of a part; nil for nil.
func Call(f func(step string)) *Steps {
	if f == nil {
		return nil
	}
	return &Steps{reached: f}
}

// Reached says that the step was just done.
func (s *Steps) Reached(step string) {
	if s != nil {
		s.reached(step)
	}
}
