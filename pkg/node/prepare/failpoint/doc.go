// Package failpoint stops a real plugin at a named step, so that tests can see
// what the next start makes of what was left. It does something only in a
// binary that was built with the tag failpoints, whose environment names the
// step in TESSERA_FAILPOINT.
//
// What wires the plugin passes Step to all that has steps: the journal, the
// partition manager, and prepare. The names of the steps are where those call
// it. A step is where an effect has just happened that a crash could leave
// alone, and has one name in the whole plugin.
package failpoint

const (
	// Variable is the environment variable that names the step, "name" or, for
	// the n-th time it is come to, "name#n".
	Variable = "TESSERA_FAILPOINT"
	// RecordVariable names a file that gets a line with each step come to.
	RecordVariable = "TESSERA_FAILPOINT_RECORD"
)
