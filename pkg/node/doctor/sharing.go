package doctor

import (
	"fmt"
	"maps"
	"path/filepath"
	"slices"
	"strings"
	"syscall"

	specs "tags.cncf.io/container-device-interface/specs-go"

	"github.com/tessera-dra/tessera/pkg/gpu"
	"github.com/tessera-dra/tessera/pkg/mps"
	"github.com/tessera-dra/tessera/pkg/node/holding"
	"github.com/tessera-dra/tessera/pkg/node/journal"
	"github.com/tessera-dra/tessera/pkg/nvml"
)

// The advice for problems that the plugin retries.
const (
	askPlugin     = "the plugin retries within a minute, and its log says why it fails"
	askSupervisor = "check the node's pod of the DaemonSet tessera-mps, which starts the daemons"
)

// sharingLook is the check of MPS daemons and settings.
type sharingLook struct {
	*look
	// needed has the daemons that claims need, by name.
	needed  map[string]*neededDaemon
	daemons map[string]mps.State
	// intervals has the intervals that claims request, replicas the GPUs of which
	// claims have replicas.
	intervals map[gpu.UUID]string
	replicas  map[gpu.UUID]bool
	// unsure is true if there is a claim with an unreadable record, which may need
	// anything.
	unsure bool
}

// neededDaemon is a daemon that claims need.
type neededDaemon struct {
	claims  []string
	devices []gpu.Device
	threads int
	memory  []int64
}

// checkSharing compares the claims' records with the daemons and the GPUs'
// settings, in both directions.
func (l *look) checkSharing() {
	if l.Sharing == nil {
		return
	}
	s := sharingLook{
		look: l, needed: map[string]*neededDaemon{}, daemons: map[string]mps.State{},
		intervals: map[gpu.UUID]string{}, replicas: map[gpu.UUID]bool{}, unsure: len(l.journal.Unreadable) > 0,
	}
	for _, r := range l.journal.Claims {
		if l.holds(r) {
			s.need(r)
		}
	}
	if s.readDaemons() {
		l.daemons = len(s.daemons)
		s.checkDaemons()
		s.checkReached()
	}
	for _, u := range l.journal.UnreadableSettings {
		l.add(Finding{
			Level: Leftover, Check: "settings-record-unreadable", GPU: u.GPU, Path: u.Path,
			What: fmt.Sprintf("the record of the GPU's original compute mode and time slice can't be read (%v); they will be set to the driver's initial values", u.Err),
		})
	}
	for _, g := range l.gpus {
		s.checkSettings(g.UUID)
	}
}

func (s *sharingLook) need(r holding.Record) {
	for _, g := range r.Holdings {
		if g.Admin {
			continue
		}
		if g.TimeSlice != "" {
			s.intervals[g.GPU] = g.TimeSlice
		}
		s.replicas[g.GPU] = s.replicas[g.GPU] || g.Replica != nil
		name := r.Daemon(g)
		if name == "" {
			continue
		}
		d := s.needed[name]
		if d == nil {
			d = &neededDaemon{threads: g.MPS.ThreadPercentage}
			s.needed[name] = d
		}
		d.take(claimName(r), g)
	}
}

// take adds a holding's needs.
func (d *neededDaemon) take(claim string, g holding.Holding) {
	loosest := func(a, b int64) int64 {
		if a == 0 || b == 0 {
			return 0
		}
		return max(a, b)
	}
	if !slices.Contains(d.claims, claim) {
		d.claims = append(d.claims, claim)
	}
	d.threads = int(loosest(int64(d.threads), int64(g.MPS.ThreadPercentage)))
	if i := slices.Index(d.devices, g.Base()); i >= 0 {
		d.memory[i] = loosest(d.memory[i], g.MPS.MemoryMiB)
		return
	}
	d.devices, d.memory = append(d.devices, g.Base()), append(d.memory, g.MPS.MemoryMiB)
}

// readDaemons reads the daemons and reports whether the supervisor has
// answered.
func (s *sharingLook) readDaemons() bool {
	if s.Sharing.Away == nil {
		for _, d := range s.Sharing.Daemons {
			s.daemons[d.Name] = d
		}
		return true
	}
	if len(s.needed) > 0 {
		s.add(Finding{
			Level: Trouble, Check: "mps-supervisor-away", Path: s.Sharing.Dir, Do: askSupervisor,
			What: fmt.Sprintf("claims need MPS daemons (%s), and the MPS supervisor can't be reached: %v; running daemons continue", strings.Join(slices.Sorted(maps.Keys(s.needed)), ", "), s.Sharing.Away),
		})
	}
	for _, name := range s.Sharing.Remains {
		if s.needed[name] == nil && !s.unsure {
			s.add(Finding{
				Level: Trouble, Check: "mps-daemon-without-claim", GPU: s.gpuOf(name), Device: name, Path: filepath.Join(s.Sharing.Dir, name), Do: askSupervisor,
				What: "an MPS daemon that no claim needs may be running, and the supervisor, which could stop it, doesn't answer",
			})
		}
	}
	return false
}

func (s *sharingLook) checkDaemons() {
	for name, need := range s.needed {
		base := Finding{Level: Trouble, GPU: need.devices[0].Parent(), Device: name, Claim: need.claims[0], Path: filepath.Join(s.Sharing.Dir, name)}
		have, ok := s.daemons[name]
		switch {
		case !ok:
			base.Check, base.What, base.Do = "mps-daemon-missing", "the claim's containers need an MPS daemon that doesn't exist: CUDA fails in them", askPlugin
			s.add(base)
		case have.Phase != mps.Running:
			base.Check, base.Do = "mps-daemon-failed", askSupervisor+", and its log says why this one doesn't run"
			base.What = fmt.Sprintf("the MPS daemon that the claim's containers need is %s: %s", strings.ToLower(string(have.Phase)), have.Message)
			s.add(base)
		default:
			s.checkDaemon(base, *need, have)
		}
	}
	if !s.unsure {
		s.checkUnneeded()
	}
	for _, name := range s.Sharing.Remains {
		if _, ok := s.daemons[name]; !ok {
			s.add(Finding{
				Level: Trouble, Check: "mps-directory-left", GPU: s.gpuOf(name), Device: name, Path: filepath.Join(s.Sharing.Dir, name),
				What: "there is a directory of an MPS daemon that the supervisor doesn't list", Do: "restart the node's pod of the DaemonSet tessera-mps: it stops a daemon of that name, and removes the directory",
			})
		}
	}
}

// checkUnneeded reports daemons that no claim needs.
func (s *sharingLook) checkUnneeded() {
	for name, have := range s.daemons {
		if s.needed[name] != nil {
			continue
		}
		f := Finding{Level: Trouble, GPU: s.gpuOf(name), Device: name, Path: filepath.Join(s.Sharing.Dir, name)}
		f.Check, f.What, f.Do = "mps-daemon-without-claim", "an MPS daemon runs that no claim needs", "restart the plugin's pod on this node: it stops the daemon"
		if have.Phase == mps.Ending {
			f.Level, f.Check, f.Do = Leftover, "mps-daemon-ending", ""
			f.What = "an MPS daemon that no claim needs is being stopped; the next claim of the GPU waits for it"
		}
		s.add(f)
	}
}

// checkDaemon compares a running daemon with the claims' needs.
func (s *sharingLook) checkDaemon(base Finding, need neededDaemon, have mps.State) {
	if _, err := s.stat(filepath.Join("/", have.PipeDir)); err != nil {
		base.Check, base.Path, base.Do = "mps-pipe-missing", have.PipeDir, "delete the claim's pods, and those of all claims on the GPU: a new daemon is started for the next"
		base.What = "the directory through which containers reach the MPS daemon is missing although the daemon runs: somebody has removed it"
		s.add(base)
	}
	s.checkServed(base, have)
	var want []gpu.UUID
	for _, d := range need.devices {
		want = append(want, s.uuidOf(d))
	}
	if !slices.Contains(want, "") && !slices.Equal(want, have.Devices) {
		base.Check, base.Do = "mps-daemon-differs", "delete the claim's pods: a new daemon is started for the next"
		base.What = fmt.Sprintf("the claim's containers need an MPS daemon of %v, and this one has %v", want, have.Devices)
		s.add(base)
	}
	if !slices.ContainsFunc(need.memory, func(m int64) bool { return m > 0 }) {
		need.memory = nil
	}
	if threads := func(n int) int { return n % 100 }; threads(have.ThreadPercentage) != threads(need.threads) || !slices.Equal(have.MemoryMiB, need.memory) {
		base.Level, base.Check, base.Do = Leftover, "mps-limits-differ", ""
		base.What = fmt.Sprintf("the MPS daemon limits its clients to %d %% of the threads and %v MiB, but its claims need %d %% and %v", have.ThreadPercentage, have.MemoryMiB, need.threads, need.memory)
		s.add(base)
	}
}

// checkServed checks that a running daemon accepts clients, and that its /dev/shm
// has a size limit.
func (s *sharingLook) checkServed(base Finding, have mps.State) {
	if have.Trouble != "" {
		base.Check, base.Do = "mps-daemon-failed", "if this stays, delete the pods of all claims on the GPU: the daemon ends with the last of them"
		base.What = "the MPS daemon that the claim's containers need runs, but accepts no clients: " + have.Trouble
		s.add(base)
	}
	if have.ShmDir == "" {
		return
	}
	own, ok := s.fileSystem(have.ShmDir)
	around, _ := s.fileSystem(filepath.Dir(have.ShmDir))
	if ok && own == around {
		base.Check, base.Path = "mps-shm-unbounded", have.ShmDir
		base.What = "the daemon's /dev/shm, to which its clients write, is not a separate file system: they can fill the host's /run"
		base.Do = "check that the pod of the DaemonSet tessera-mps has the volume run with mountPropagation Bidirectional; then delete the pods of all claims on the GPU"
		s.add(base)
	}
}

// fileSystem returns the number of the file system of a path of the host; false if
// that is unknown.
func (s *sharingLook) fileSystem(path string) (uint64, bool) {
	info, err := s.stat(filepath.Join("/", path))
	if err != nil {
		return 0, false
	}
	stat, ok := info.Sys().(*syscall.Stat_t)
	if !ok {
		return 0, false
	}
	return stat.Dev, true
}

// checkReached reports claims whose containers don't get the directory of their
// MPS daemon.
func (s *sharingLook) checkReached() {
	for _, r := range s.journal.Claims {
		for _, g := range r.Holdings {
			daemon, ok := s.daemons[r.Daemon(g)]
			device, known := s.specs[r.ClaimUID+"-"+string(g.CDIName())]
			if !ok || !known || !s.holds(r) || slices.ContainsFunc(device.mounts, func(m *specs.Mount) bool { return m.HostPath == daemon.PipeDir }) {
				continue
			}
			s.add(Finding{
				Level: Trouble, Check: "cdi-mps-missing", Claim: claimName(r), GPU: g.GPU, Device: string(g.Device), Path: device.path,
				What: fmt.Sprintf("the CDI spec lacks %s, through which the claim's containers reach their MPS daemon", daemon.PipeDir), Do: restart + "; then delete the claim's pods",
			})
		}
	}
}

// uuidOf returns the UUID under which a daemon sees a device; empty if the
// device doesn't exist.
func (s *sharingLook) uuidOf(d gpu.Device) gpu.UUID {
	p, ok := d.(gpu.Partition)
	if !ok {
		return d.Parent()
	}
	instances := s.migs[p.GPU].Instances
	if i := slices.IndexFunc(instances, func(i gpu.Instance) bool { return sits(i, p) }); i >= 0 {
		return instances[i].UUID
	}
	return ""
}

// gpuOf returns the GPU after which a daemon is named, if any.
func (s *sharingLook) gpuOf(daemon string) gpu.UUID {
	if s.names == nil {
		return ""
	}
	uuid, _ := s.names.Parent(gpu.DeviceName(daemon))
	return uuid
}

// settings returns the recorded settings of a GPU.
func (s *sharingLook) settings(uuid gpu.UUID) (holding.Settings, bool) {
	i := slices.IndexFunc(s.journal.Settings, func(r holding.Settings) bool { return r.GPU == uuid })
	if i < 0 {
		return holding.Settings{}, false
	}
	return s.journal.Settings[i], true
}

// checkSettings compares a GPU's settings with the record and with the claims'
// needs.
func (s *sharingLook) checkSettings(uuid gpu.UUID) {
	r, recorded := s.settings(uuid)
	if recorded && r.BootID != s.BootID {
		s.add(Finding{
			Level: Leftover, Check: "settings-record-of-earlier-boot", GPU: uuid, Path: journal.SettingsFile(s.Journal, uuid),
			What: "the journal has settings from before the last reboot, which the driver has reset; the plugin removes this record when it starts",
		})
		r = holding.Settings{}
	}
	s.checkMode(uuid, r.ComputeModeBefore, r.Closed)
	s.checkTimeSlice(uuid, r.TimeSliceBefore)
}

// hasWhole reports whether claims need a daemon of the whole GPU.
func (s *sharingLook) hasWhole(uuid gpu.UUID) bool {
	for _, d := range s.needed {
		if slices.Contains(d.devices, gpu.Device(gpu.Whole{GPU: uuid})) {
			return true
		}
	}
	return false
}

// forNothing reports a changed setting that no claim needs.
func (s *sharingLook) forNothing(check, what string, uuid gpu.UUID, now, before string) {
	s.add(Finding{
		Level: Leftover, Check: check, GPU: uuid, Path: journal.SettingsFile(s.Journal, uuid),
		What: fmt.Sprintf("the %s was changed for claims that are gone; it is %q, was %q, and will be restored", what, now, before),
	})
}

func (s *sharingLook) checkMode(uuid gpu.UUID, before string, closed bool) {
	needed := s.hasWhole(uuid)
	mode, known := s.Hardware.ComputeModes[uuid]
	switch {
	case before != "" && !needed && !s.unsure:
		s.forNothing("compute-mode-for-nothing", "compute mode", uuid, string(mode), before)
	case !known:
	case closed && mode == nvml.ComputeProhibited: // until the daemon is back, which is another finding
	case needed && before != "" && mode != nvml.ComputeExclusiveProcess:
		s.add(Finding{
			Level: Trouble, Check: "compute-mode-changed", GPU: uuid,
			What: fmt.Sprintf("the GPU has an MPS daemon, and somebody has set its compute mode to %s: programs that aren't the daemon's clients can use it", mode),
			Do:   fmt.Sprintf("find out which program has set it, and set it again: nvidia-smi -i %s -c EXCLUSIVE_PROCESS", uuid),
		})
	case before == "" && mode != nvml.ComputeDefault:
		s.add(Finding{
			Level: Note, Check: "compute-mode-of-others", GPU: uuid,
			What: fmt.Sprintf("somebody else has set the compute mode to %s; Tessera doesn't change it", mode),
		})
	}
}

func (s *sharingLook) checkTimeSlice(uuid gpu.UUID, before string) {
	want := s.intervals[uuid]
	needed := want != "" || s.replicas[uuid]
	if want == gpu.DefaultTimeSlice {
		want = ""
	}
	now, known := s.Hardware.TimeSlices[uuid]
	switch {
	case before != "" && !needed && !s.unsure:
		s.forNothing("time-slice-for-nothing", "time slice", uuid, now, before)
	case !known:
	case want != "" && now != want:
		s.add(Finding{
			Level: Trouble, Check: "time-slice-changed", GPU: uuid,
			What: fmt.Sprintf("a claim requests the time slice %q, but it is %q", want, now),
			Do:   "delete the claim's pods: it is set again for the next; and find out which program has changed it",
		})
	case before == "" && now != gpu.DefaultTimeSlice && !needed:
		s.add(Finding{
			Level: Note, Check: "time-slice-of-others", GPU: uuid,
			What: fmt.Sprintf("somebody else has set the time slice to %q; Tessera doesn't change it for claims with the default", now),
		})
	}
}
