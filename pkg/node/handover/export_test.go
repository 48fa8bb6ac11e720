package handover

import "net"

// Longest is the length of the longest message that is read.
const Longest = longest

// Read reads a request as Await does.
func Read(conn net.Conn) (Request, error) { return read(conn, func(Request) error { return nil }) }
