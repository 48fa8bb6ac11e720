// Package failpoint stops the plugin or the MPS supervisor at a named step, so that tests can
// check the recovery by the next start. It does something only in a binary that
// was built with the tag failpoints, whose environment names the step in
// TESSERA_FAILPOINT.
//
// pkg/node and cmd/mps-supervisor give Steps to every part that has steps. A part
// names a step where it calls Reached: right after an effect that a crash could leave
// incomplete. A name is used once in a program.
package failpoint

const (
	// Variable is the environment variable that names the step, "name" or, for
	// the n-th time it is come to, "name#n".
	Variable = "TESSERA_FAILPOINT"
	// RecordVariable names a file that gets a line with each step come to.
	RecordVariable = "TESSERA_FAILPOINT_RECORD"
)
