// Package failpoint stops a real plugin at a named step, so that tests can see
// what the next start makes of what was left. It does something only in a
// binary that was built with the tag failpoints, whose environment names the
// step in TESSERA_FAILPOINT.
//
// What wires the plugin passes Step to journal.Open, partition.New and prepare.New; the
// names of the steps are where those call it: journal.put.created, .written,
// .synced, .renamed, .durable; journal.delete.unlinked, .durable;
// prepare.locked, .recorded, .made (once a device), .written;
// unprepare.removed, .released (once a partition), .forgotten; recover.written,
// .removed; and what partition.New and the journal's records of GPUs add.
package failpoint

// Variable is the environment variable that names the step.
const Variable = "TESSERA_FAILPOINT"
