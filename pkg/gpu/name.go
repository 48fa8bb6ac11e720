package gpu

import (
	"fmt"
	"strings"
)

// DeviceName names a device inside a node's pool: a DNS label of at most 63
// characters, built from the GPU's UUID and never from an index or a minor,
// so that a name keeps meaning the same silicon across reboots.
type DeviceName string

// namePrefix starts every device's name; minHex is how much of the UUID
// follows where that is unique on the node.
const (
	namePrefix = "gpu-"
	minHex     = 8
)

// Names maps the GPUs of one node to device names and back.
// Build one with NewNames from all GPUs of the node: how long a name must be
// depends on the others.
type Names struct {
	names map[UUID]DeviceName
	gpus  map[DeviceName]UUID
}

// NewNames names the GPUs of a node: "gpu-" and the first eight hexadecimal
// digits of the UUID. GPUs whose eight digits agree get the whole UUID, both
// of them, so that the name of neither depends on the order they are found in.
// Two equal UUIDs, or one without hexadecimal digits, are an error.
func NewNames(uuids []UUID) (*Names, error) {
	short := make(map[string]int, len(uuids))
	for _, u := range uuids {
		h, err := hexDigits(u)
		if err != nil {
			return nil, err
		}
		short[h[:minHex]]++
	}
	n := &Names{names: make(map[UUID]DeviceName, len(uuids)), gpus: make(map[DeviceName]UUID, len(uuids))}
	for _, u := range uuids {
		h, err := hexDigits(u)
		if err != nil {
			return nil, err
		}
		if short[h[:minHex]] == 1 {
			h = h[:minHex]
		}
		name := DeviceName(namePrefix + h)
		if _, dup := n.gpus[name]; dup {
			return nil, fmt.Errorf("GPU %s is listed twice", u)
		}
		n.names[u], n.gpus[name] = name, u
	}
	return n, nil
}

// Name returns the device's name. A device of a GPU that Names wasn't built
// from has none.
func (n *Names) Name(d Device) (DeviceName, bool) {
	switch d := d.(type) {
	case Whole:
		name, ok := n.names[d.GPU]
		return name, ok
	default:
		return "", false
	}
}

// Device returns what a name stands for, or an error that says what the name
// should look like or that the node has no such GPU.
func (n *Names) Device(name DeviceName) (Device, error) {
	if u, ok := n.gpus[name]; ok {
		return Whole{GPU: u}, nil
	}
	if !strings.HasPrefix(string(name), namePrefix) {
		return nil, fmt.Errorf("device %q: not a name of this driver (want %s<UUID digits>)", name, namePrefix)
	}
	return nil, fmt.Errorf("device %q: this node has no such GPU now", name)
}

// hexDigits returns the 32 digits of a "GPU-…" UUID, lower case, no dashes.
func hexDigits(u UUID) (string, error) {
	s, ok := strings.CutPrefix(string(u), "GPU-")
	if !ok {
		return "", fmt.Errorf("UUID %q: does not start with GPU-", u)
	}
	s = strings.ToLower(strings.ReplaceAll(s, "-", ""))
	if len(s) != 32 || strings.Trim(s, "0123456789abcdef") != "" {
		return "", fmt.Errorf("UUID %q: want 32 hexadecimal digits after GPU-", u)
	}
	return s, nil
}
