package handover

import "net"

// Longest is the length of the longest message that is read.
const Longest = longest

// Die closes the connection, as the end of the process does.
func (g *Granted) Die() error { return g.conn.Close() }

// Read reads a request as Await does.
func Read(conn net.Conn) (Request, error) { return read(conn, func(Request) error { return nil }) }

// Accept returns a request that was accepted on the connection.
func Accept(conn net.Conn) *Accepted { return &Accepted{conn: conn} }
