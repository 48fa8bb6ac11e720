package gpu

import (
	"fmt"
	"strconv"
	"strings"
)

// DeviceName names a device inside a node's pool: a DNS label of at most 63
// characters, built from the GPU's UUID and never from an index or a minor,
// so that a name keeps meaning the same silicon across reboots.
type DeviceName string

// IsPartition reports whether the name is that of a MIG partition, or of a
// share of one. The node's Names can tell which one, and whether it can exist.
func (n DeviceName) IsPartition() bool { return strings.Contains(string(n), partitionInfix) }

// IsShare reports whether the name is that of an MPS share.
func (n DeviceName) IsShare() bool { return strings.Contains(string(n), shareInfix) }

// AllowsMultipleAllocations reports whether the name is that of an MPS share without
// a number, a device that can be allocated several times.
func (n DeviceName) AllowsMultipleAllocations() bool { return strings.HasSuffix(string(n), shareInfix) }

// IsReplica reports whether the name is that of a time-sliced replica.
func (n DeviceName) IsReplica() bool { return strings.Contains(string(n), replicaInfix) }

// The types of devices, as the attribute type and metrics have them.
const (
	TypeGPU       = "gpu"
	TypeMIG       = "mig"
	TypeMPS       = "mps"
	TypeTimeSlice = "timeslice"
)

// DeviceClasses of the chart.
const (
	ClassGPU       = "gpu.nvidia.com"
	ClassMIG       = "mig.nvidia.com"
	ClassMPS       = "mps.gpu.nvidia.com"
	ClassTimeSlice = "timeslice.gpu.nvidia.com"
)

// ResourceDomain is that of the extended resources that the chart's classes have.
const ResourceDomain = "nvidia.com"

// Type returns the attribute type of a new device of that name.
func (n DeviceName) Type() string {
	switch {
	case n.IsShare():
		return TypeMPS
	case n.IsReplica():
		return TypeTimeSlice
	case n.IsPartition():
		return TypeMIG
	default:
		return TypeGPU
	}
}

// namePrefix starts every device's name; minHex is how much of the UUID
// follows where that is unique on the node.
const (
	namePrefix = "gpu-"
	minHex     = 8
	// partitionInfix separates a GPU's name from that of its partition.
	partitionInfix = "-mig-"
	// shareInfix separates the name of the shared device from the number of shares
	// and the number of this one.
	shareInfix = "-mps"
	// replicaInfix does so for replicas.
	replicaInfix = "-ts"
)

// The most shares or replicas that a name can tell of.
const (
	maxShares   = 100
	maxReplicas = 100
)

// Names maps the devices of one node to names and back.
// Build one with NewNames from all GPUs of the node: how long a name must be
// depends on the others.
type Names struct {
	names map[UUID]DeviceName
	gpus  map[DeviceName]GPU
}

// NewNames names the GPUs of a node: "gpu-" and the first eight hexadecimal
// digits of the UUID. GPUs whose eight digits agree get the whole UUID, both
// of them, so that the name of neither depends on the order they are found in.
// Two equal UUIDs, or one without hexadecimal digits, are an error.
//
// A partition's name is its GPU's, "-mig-", the profile without dots and plus
// signs, and the first memory slice: "gpu-980fb007-mig-1g18gb-4". Which
// partitions there can be, the GPU's profiles say.
//
// An equal share's name says how many there are and which it is, so that it
// keeps meaning the same part when there are to be more or fewer:
// "gpu-980fb007-mps4-2" is number 2 of 0 to 3. One that is allocated several times is
// "gpu-980fb007-mps". Shares of a partition have its name in place of the GPU's.
// A replica's is "gpu-980fb007-ts4-2".
func NewNames(gpus []GPU) (*Names, error) {
	short := make(map[string]int, len(gpus))
	for _, g := range gpus {
		h, err := hexDigits(g.UUID)
		if err != nil {
			return nil, err
		}
		short[h[:minHex]]++
	}
	n := &Names{names: make(map[UUID]DeviceName, len(gpus)), gpus: make(map[DeviceName]GPU, len(gpus))}
	for _, g := range gpus {
		h, err := hexDigits(g.UUID)
		if err != nil {
			return nil, err
		}
		if short[h[:minHex]] == 1 {
			h = h[:minHex]
		}
		name := DeviceName(namePrefix + h)
		if _, dup := n.gpus[name]; dup {
			return nil, fmt.Errorf("GPU %s is listed twice", g.UUID)
		}
		n.names[g.UUID], n.gpus[name] = name, g
	}
	return n, nil
}

// NameAll names those GPUs of a node that NewNames can name: one whose UUID has another form,
// or is that of another GPU too, has no name, and costs no other its own.
func NameAll(gpus []GPU) *Names {
	key := func(u UUID) string { return strings.ToLower(strings.ReplaceAll(string(u), "-", "")) }
	count := make(map[string]int, len(gpus))
	for _, g := range gpus {
		count[key(g.UUID)]++
	}
	var good []GPU
	for _, g := range gpus {
		if _, err := hexDigits(g.UUID); err == nil && count[key(g.UUID)] == 1 {
			good = append(good, g)
		}
	}
	names, err := NewNames(good)
	if err != nil {
		names = &Names{} // names nothing; each was good and none is there twice
	}
	return names
}

// Name returns the device's name. A device of a GPU that Names wasn't built
// from has none.
func (n *Names) Name(d Device) (DeviceName, bool) {
	whole, ok := n.names[d.Parent()]
	if !ok {
		return "", false
	}
	switch d := d.(type) {
	case Whole:
		return whole, true
	case Partition:
		return DeviceName(fmt.Sprintf("%s%s%s-%d", whole, partitionInfix, ProfileLabel(d.Profile), d.Placement.Start)), true
	case Share:
		of, ok := n.Name(d.Of)
		return of + DeviceName(shareInfix+part(d.Count, d.Number)), ok
	case Replica:
		return whole + DeviceName(replicaInfix+part(d.Count, d.Number)), true
	default:
		return "", false
	}
}

// part writes "4-2", or nothing where there is no count.
func part(count, number int) string {
	if count == 0 {
		return ""
	}
	return fmt.Sprintf("%d-%d", count, number)
}

// Part returns among how many equal shares or replicas the device is one, and which;
// zeros if the name isn't that of such a device.
func (n DeviceName) Part() (count, number int) {
	for _, infix := range []string{shareInfix, replicaInfix} {
		if _, which, ok := cutLast(n, infix); ok {
			count, number, _ = readPart(which, max(maxShares, maxReplicas))
			return count, number
		}
	}
	return 0, 0
}

// readPart parses exactly the texts that part writes.
func readPart(s string, most int) (count, number int, ok bool) {
	c, n, _ := strings.Cut(s, "-")
	count, err := strconv.Atoi(c)
	if err != nil || count < 2 || count > most {
		return 0, 0, false
	}
	number, err = strconv.Atoi(n)
	if err != nil || number < 0 || number >= count || part(count, number) != s {
		return 0, 0, false
	}
	return count, number, true
}

// Device returns the device with a name, or an error: the name has the wrong
// form, the node has no such GPU, or the GPU can't be divided that way.
func (n *Names) Device(name DeviceName) (Device, error) {
	if of, which, ok := cutLast(name, shareInfix); ok {
		return n.share(name, of, which)
	}
	if of, which, ok := cutLast(name, replicaInfix); ok {
		return n.replica(name, of, which)
	}
	whole, part, isPart := strings.Cut(string(name), partitionInfix)
	g, ok := n.gpus[DeviceName(whole)]
	switch {
	case ok && isPart:
		return partition(g, name, part)
	case ok:
		return Whole{GPU: g.UUID}, nil
	case !strings.HasPrefix(string(name), namePrefix):
		return nil, fmt.Errorf("device %q: not a name of this driver (want %s<UUID digits>)", name, namePrefix)
	default:
		return nil, fmt.Errorf("device %q: this node has no such GPU now: delete the pod so that its claim is allocated again", name)
	}
}

func cutLast(name DeviceName, infix string) (of DeviceName, rest string, ok bool) {
	i := strings.LastIndex(string(name), infix)
	if i < 0 {
		return name, "", false
	}
	return name[:i], string(name[i+len(infix):]), true
}

func (n *Names) share(name, of DeviceName, which string) (Device, error) {
	base, err := n.Device(of)
	if err != nil {
		return nil, fmt.Errorf("device %q: %w", name, err)
	}
	switch base.(type) {
	case Whole, Partition:
	case Share, Replica:
		return nil, fmt.Errorf("device %q: %s has no MPS shares", name, of)
	}
	if which == "" {
		return Share{Of: base}, nil
	}
	count, number, ok := readPart(which, maxShares)
	if !ok {
		return nil, fmt.Errorf("device %q: not a name of an MPS share (want %s%s4-0, say)", name, of, shareInfix)
	}
	return Share{Of: base, Count: count, Number: number}, nil
}

func (n *Names) replica(name, of DeviceName, which string) (Device, error) {
	base, err := n.Device(of)
	if err != nil {
		return nil, fmt.Errorf("device %q: %w", name, err)
	}
	whole, ok := base.(Whole)
	if !ok {
		return nil, fmt.Errorf("device %q: %s has no replicas", name, of)
	}
	count, number, ok := readPart(which, maxReplicas)
	if !ok {
		return nil, fmt.Errorf("device %q: not a name of a replica (want %s%s4-0, say)", name, of, replicaInfix)
	}
	return Replica{GPU: whole.GPU, Count: count, Number: number}, nil
}

// Parent returns the GPU that a device's name is of, also where that GPU can't
// be cut in the way that the name says.
func (n *Names) Parent(name DeviceName) (UUID, bool) {
	g, ok := n.gpus[name.Whole()]
	return g.UUID, ok
}

// Whole returns the name of the GPU that a device's name is of.
func (n DeviceName) Whole() DeviceName {
	i := strings.IndexByte(strings.TrimPrefix(string(n), namePrefix), '-')
	if i < 0 {
		return n
	}
	return n[:len(n)-len(strings.TrimPrefix(string(n), namePrefix))+i]
}

// MayBeOf reports whether a device of the GPU may have the name. It needs no Names,
// and so can't tell GPUs apart whose UUIDs begin with the same eight digits.
func (n DeviceName) MayBeOf(u UUID) bool {
	digits, err := hexDigits(u)
	return err == nil && strings.HasPrefix(string(n), namePrefix+digits[:minHex])
}

// partition reads "1g18gb-4".
func partition(g GPU, name DeviceName, part string) (Device, error) {
	if g.MIG == nil {
		return nil, fmt.Errorf("device %q: GPU %s has no MIG", name, g.UUID)
	}
	for _, p := range g.MIG.Profiles {
		for _, at := range p.Placements {
			if fmt.Sprintf("%s-%d", ProfileLabel(p.Name), at.Start) == part {
				return Partition{GPU: g.UUID, Profile: p.Name, Placement: at}, nil
			}
		}
	}
	return nil, fmt.Errorf("device %q: GPU %s has no MIG profile with that placement", name, g.UUID)
}

// ProfileLabel returns a profile's name in the form that a DNS label may contain:
// "1g.10gb+me" becomes "1g10gbme". Profiles of one GPU have different labels.
func ProfileLabel(profile string) string {
	return strings.ReplaceAll(strings.ReplaceAll(profile, ".", ""), "+", "")
}

// SharedDevice returns the name of the device that a share with this name is part of;
// empty if the name is not a share's.
func (n DeviceName) SharedDevice() DeviceName {
	return n[:max(0, strings.LastIndex(string(n), shareInfix))]
}

// hexDigits returns the 32 digits of a "GPU-…" UUID, lower case, no dashes.
func hexDigits(u UUID) (string, error) {
	s, ok := strings.CutPrefix(string(u), wholePrefix)
	if !ok {
		return "", fmt.Errorf("UUID %q: does not start with %s", u, wholePrefix)
	}
	s = strings.ToLower(strings.ReplaceAll(s, "-", ""))
	if len(s) != 32 || strings.Trim(s, "0123456789abcdef") != "" {
		return "", fmt.Errorf("UUID %q: want 32 hexadecimal digits after %s", u, wholePrefix)
	}
	return s, nil
}
