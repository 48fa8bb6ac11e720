package mps

import "maps"

func (c *control) find(pid uint32) *child {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.running == nil || c.running.pid != pid {
		return nil
	}
	return c.running
}

func (c *control) servers() []uint32 {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.running == nil {
		return nil
	}
	return []uint32{c.running.pid}
}

func (c *control) status(pid uint32) (string, bool) {
	s := c.find(pid)
	if s == nil {
		return "", false
	}
	select {
	case <-s.ready:
		return "ACTIVE", true
	default:
		return "INITIALIZING", true
	}
}

// list returns nil for a server that isn't ready.
func (c *control) list(pid uint32) []served {
	s := c.find(pid)
	if s == nil {
		return nil
	}
	select {
	case <-s.ready:
	default:
		return nil
	}
	s.asking.Lock()
	defer s.asking.Unlock()
	s.lists++
	if s.link.send(order{List: s.lists}, nil) != nil {
		return nil
	}
	select {
	case r := <-s.answers:
		return r.Devices
	case <-s.ended:
		return nil
	}
}

func (c *control) terminate(pid, client uint32) bool {
	s := c.find(pid)
	return s != nil && s.link.send(order{Terminate: client}, nil) == nil
}

func (c *control) defaults() bounds {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.upcoming.clone()
}

func (c *control) setDefaults(change func(*bounds)) {
	c.mu.Lock()
	defer c.mu.Unlock()
	change(&c.upcoming)
}

func (c *control) bounds(pid uint32) (bounds, bool) {
	s := c.find(pid)
	if s == nil {
		return bounds{}, false
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	return s.limit.clone(), true
}

// setBounds sets the limits of future clients (assumed: existing clients keep
// theirs).
func (c *control) setBounds(pid uint32, change func(*bounds)) bool {
	s := c.find(pid)
	if s == nil {
		return false
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	change(&s.limit)
	return s.link.send(order{Threads: s.limit.threads, Memory: s.limit.memory}, nil) == nil
}

func (b bounds) clone() bounds { return bounds{threads: b.threads, memory: maps.Clone(b.memory)} }
