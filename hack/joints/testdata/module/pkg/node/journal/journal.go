// Package journal is below node.
package journal

// Record is what has a key.
type Record interface{ Key() string } // want: interface

// Open opens nothing.
func Open() { start(new(client)) }
