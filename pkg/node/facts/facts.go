package facts

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/tessera-dra/tessera/api/gpu/v1alpha1"
	"github.com/tessera-dra/tessera/pkg/gpu"
	"github.com/tessera-dra/tessera/pkg/notify"
)

// Reasons why there are no GPUs, of the condition Ready.
const (
	// ReasonDriverNotFound: the host has no NVIDIA driver (yet).
	ReasonDriverNotFound = "DriverNotFound"
	// ReasonNVMLError: the driver is there and doesn't work.
	ReasonNVMLError = v1alpha1.ReasonNVMLError
)

// Facts has the known facts about one node. Its methods may be called
// concurrently; none but WaitNodeSeen and AwaitRequest blocks.
type Facts struct {
	nodeName string
	requests requests

	mu      notify.Mutex // of all below
	known   bool         // Found or Missing was called
	node    gpu.Node     // read, with health
	read    gpu.Node
	health  map[gpu.UUID][]gpu.Condition
	names   *gpu.Names
	trouble Trouble
	listing Listing
	// seen: the Node object has been seen, and is there.
	seen bool
	// devicePlugin and draDriver name another driver that serves the GPUs, with
	// the remedy; empty: none.
	devicePlugin, draDriver string
	// registered is when the kubelet has registered the plugin last; zero: it hasn't.
	registered time.Time
}

// Trouble is why the node has no GPUs to offer; zero while it has.
type Trouble struct{ Reason, Message string }

// Listing is how many GPUs NVML lists, and how many of these are identified, by their answer
// or from an earlier one.
type Listing struct {
	Listed, Identified int
	// Message says why the others aren't.
	Message string
}

// New returns Facts that know nothing yet.
func New(nodeName string) *Facts {
	return &Facts{nodeName: nodeName, requests: requests{wake: make(chan struct{}, 1)}}
}

// State is a copy of the facts at one time.
type State struct {
	// Known: the GPUs have been looked for.
	Known   bool
	Node    gpu.Node
	Trouble Trouble
	Listing Listing
	// DevicePlugin and DRADriver name another driver that serves the GPUs, with
	// the remedy; empty: none.
	DevicePlugin, DRADriver string
	// Registered is when the kubelet has registered the plugin last; zero: it hasn't.
	Registered time.Time
}

// Conflict returns the sentence about another driver that serves the GPUs; empty: none.
func (s State) Conflict() string { return cmp.Or(s.DevicePlugin, s.DRADriver) }

// State returns what is known now, and a channel that is closed when that changes.
func (f *Facts) State() (State, <-chan struct{}) {
	f.mu.Lock()
	defer f.mu.Unlock()
	return State{
		Known: f.known, Node: f.node, Trouble: f.trouble, Listing: f.listing,
		DevicePlugin: f.devicePlugin, DRADriver: f.draDriver, Registered: f.registered,
	}, f.mu.Changed()
}

// SetListing sets how many GPUs NVML lists, before Found.
func (f *Facts) SetListing(l Listing) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.listing = l
}

// Found sets the GPUs, and ends a reading. A GPU that can't be named has no devices.
func (f *Facts) Found(node gpu.Node) {
	defer f.requests.reading.take()
	f.mu.Change(func() {
		f.known, f.read, f.names, f.trouble = true, node, gpu.NameAll(node.GPUs), Trouble{}
		f.node = f.withHealth()
	})
}

// Missing sets that there are no GPUs to offer, and why. It ends a reading.
func (f *Facts) Missing(reason, message string) {
	defer f.requests.reading.take()
	f.mu.Change(func() {
		f.known, f.names = true, nil
		f.node, f.read = gpu.Node{Name: f.nodeName}, gpu.Node{Name: f.nodeName}
		f.trouble, f.listing = Trouble{Reason: reason, Message: message}, Listing{}
	})
}

// SetHealth sets the conditions that pkg/health has decided on, by GPU. They are added
// to those of the last reading, and of each later one, and replace those of the same
// type.
func (f *Facts) SetHealth(conditions map[gpu.UUID][]gpu.Condition) {
	f.mu.Change(func() {
		f.health = conditions
		f.node = f.withHealth()
	})
}

// withHealth returns the GPUs as read, with the conditions of their health. It needs
// the lock.
func (f *Facts) withHealth() gpu.Node {
	node := f.read
	node.GPUs = slices.Clone(f.read.GPUs)
	for i, g := range node.GPUs {
		all := slices.Clone(f.health[g.UUID])
		for _, c := range g.Conditions {
			if !slices.ContainsFunc(all, func(have gpu.Condition) bool { return have.Type == c.Type }) {
				all = append(all, c)
			}
		}
		node.GPUs[i].Conditions = all
	}
	return node
}

// GPUs returns the GPUs of the last reading, those of them that didn't answer, and a
// channel that is closed when the facts change.
func (f *Facts) GPUs() (all, silent []gpu.UUID, changed <-chan struct{}) {
	f.mu.Lock()
	defer f.mu.Unlock()
	for _, g := range f.read.GPUs {
		all = append(all, g.UUID)
		if Dead(g) != nil {
			silent = append(silent, g.UUID)
		}
	}
	return all, silent, f.mu.Changed()
}

// Forget removes a GPU that the machine doesn't have any more. A later reading may find it
// again.
func (f *Facts) Forget(uuid gpu.UUID) {
	f.mu.Change(func() {
		f.read.GPUs = slices.DeleteFunc(slices.Clone(f.read.GPUs), func(g gpu.GPU) bool { return g.UUID == uuid })
		f.node = f.withHealth()
	})
}

// Device returns what a device's name stands for and the GPU it is or is part
// of, as last read. It fails while there is no driver, when the node has no such
// device, and when the GPU doesn't answer. It doesn't fail because of another driver:
// see MayPrepare.
func (f *Facts) Device(name gpu.DeviceName) (gpu.Device, gpu.GPU, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.names == nil {
		return nil, gpu.GPU{}, errors.New(f.absence())
	}
	device, err := f.names.Device(name)
	if err != nil {
		return nil, gpu.GPU{}, err
	}
	for _, g := range f.read.GPUs {
		if g.UUID == device.Parent() {
			return device, g, Dead(g)
		}
	}
	return nil, gpu.GPU{}, fmt.Errorf("this node has no GPU %s now: delete this pod so that its claim is allocated again", device.Parent())
}

// Dead returns an error for a GPU that doesn't answer, a DeadError. Other problems of a GPU are
// judged by those who know more of it.
func Dead(g gpu.GPU) error {
	for _, c := range g.Conditions {
		if c.Type == gpu.Lost || c.Type == gpu.Unreadable || c.Type == gpu.NotResponding {
			return DeadError{g.UUID, c.Type, c.Message}
		}
	}
	return nil
}

// DeadError says that a GPU doesn't answer.
type DeadError struct {
	GPU     gpu.UUID
	Type    gpu.ConditionType
	Message string
}

func (e DeadError) Error() string {
	return fmt.Sprintf("GPU %s is %s: %s; the claim can be prepared when the GPU answers again, or delete this pod so that its claim is allocated again", e.GPU, e.Type, e.Message)
}

// GPUsWith returns the GPUs that have a condition of this type.
func (f *Facts) GPUsWith(t gpu.ConditionType) []gpu.UUID {
	f.mu.Lock()
	defer f.mu.Unlock()
	var all []gpu.UUID
	for _, g := range f.node.GPUs {
		if slices.ContainsFunc(g.Conditions, func(c gpu.Condition) bool { return c.Type == t }) {
			all = append(all, g.UUID)
		}
	}
	return all
}

// Trouble returns nil while there are GPUs to serve, or could be.
func (f *Facts) Trouble() error {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.names == nil {
		return errors.New(f.absence())
	}
	return nil
}

// NoDriver reports whether the host has no driver, as far as is known.
func (f *Facts) NoDriver() bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.trouble.Reason == ReasonDriverNotFound
}

// absence says why there are no devices.
func (f *Facts) absence() string {
	if f.trouble.Message != "" {
		return f.trouble.Message
	}
	return "the GPUs of this node have not been read yet"
}

// ErrNodeUnseen begins the reason why no claim may be prepared while the API server has not
// shown the Node.
var ErrNodeUnseen = errors.New("no claim is prepared before the API server has shown Node")

// MayPrepare returns the reason why no claim may be prepared on the node now: another driver
// serves the GPUs, or the Node, which shows a device plugin, hasn't been read yet. Claims that
// are prepared keep their devices, and are restored and unprepared as usual.
func (f *Facts) MayPrepare() error {
	f.mu.Lock()
	defer f.mu.Unlock()
	switch other := cmp.Or(f.devicePlugin, f.draDriver); {
	case other != "":
		return fmt.Errorf("no claim is prepared here: %s", other)
	case !f.seen:
		return fmt.Errorf("%w %s: a device plugin may serve its GPUs", ErrNodeUnseen, f.nodeName)
	default:
		return nil
	}
}

// SetOtherDriver sets the sentence about another DRA driver that has taken the plugin's
// name at the kubelet, with the remedy; empty if none has.
func (f *Facts) SetOtherDriver(by string) {
	f.mu.Lock()
	same := f.draDriver == by
	f.mu.Unlock()
	if !same {
		f.mu.Change(func() { f.draDriver = by })
	}
}

// SetRegistered sets that the kubelet has registered the plugin just now.
func (f *Facts) SetRegistered() {
	now := time.Now()
	f.mu.Change(func() { f.registered = now })
}

// IsRegistered reports whether the kubelet has registered the plugin.
func (f *Facts) IsRegistered() bool {
	state, _ := f.State()
	return !state.Registered.IsZero()
}

// SawNode sets whether the Node object is there, and the sentence about a device
// plugin that serves its GPUs, with the remedy; empty: none.
func (f *Facts) SawNode(there bool, devicePlugin string) {
	f.mu.Change(func() { f.seen, f.devicePlugin = there, devicePlugin })
}

// WaitNodeSeen returns nil once the Node object has been seen.
func (f *Facts) WaitNodeSeen(ctx context.Context) error {
	return f.mu.Wait(ctx, func() bool { return f.seen })
}
