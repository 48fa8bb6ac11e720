package main

import (
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/tessera-dra/tessera/sim/nvmlsim"
	"github.com/tessera-dra/tessera/sim/nvmlsim/driverroot"
)

// recoveryActions are the names of NVML's recovery actions, by value.
func recoveryActions() []string {
	return []string{"none", "reset", "reboot", "drain-p2p", "drain-and-reset", "recover-imex", "bus-reset", "system-reboot"}
}

// breakage holds the flags of break.
type breakage struct {
	lost, wedged, resetRequired, sram bool
	modePends, noNode, noCapabilities bool

	xids             []uint
	gi, ci           int
	pid              uint32
	name             string
	recovery, remap  string
	nvlink, fabric   string
	eccErrors        uint64
	changesECCErrors bool
}

const breakHelp = `Breaks GPUs as hardware breaks. They stay broken until heal, or until a reset, a
reload of the driver or a reboot, as far as these help on hardware.

A program that fails, and nothing else (a misaligned write raises 13, then 31):

    nvmlsim break 0 --xid 13,31 --pid 4711 --name train --root DIR
    nvmlsim break 0 --gi 9 --ci 0 --xid 31 --pid 4711 --name train --root DIR    # in a MIG device

A GPU that must be reset. The error may come before the driver knows what to do
about it, or after; the second command adds XID 154, as the driver does:

    nvmlsim break 0 --xid 95 --root DIR
    nvmlsim break 0 --recovery reset --root DIR
    nvmlsim reset 0 --root DIR                            # or: nvidia-smi --gpu-reset -i 0

Others:

    nvmlsim break 3 --lost --recovery reboot --root DIR   # fallen off the bus, with XID 79
    nvmlsim break 3 --wedged --root DIR                   # no call for it returns
    nvmlsim break 3 --reset-required --root DIR           # calls answer GPU requires restart
    nvmlsim break 3 --xid 63 --remap pending --root DIR   # until a reset
    nvmlsim break 3 --ecc 2 --xid 48 --root DIR           # uncorrectable errors
    nvmlsim break 3 --nvlink 0,4 --xid 74 --root DIR
    nvmlsim break 3 --fabric not-started --root DIR       # Fabric Manager isn't running
    nvmlsim break 3 --mig-mode-pends --root DIR           # a change of the MIG mode waits for a reset
    nvmlsim break 3 --no-node --root DIR                  # /dev/nvidia3 is missing
    nvmlsim break 3 --no-capabilities --root DIR          # access to its MIG instances is missing
    nvmlsim break 0 1 2 3 4 5 6 7 --xid 79 --root DIR     # a storm

Every XID becomes an NVML event and a record of the kernel log, DIR/` + nvmlsim.KernelLogFile + `
(a file in the format of /dev/kmsg); only the log has the process. An XID
changes nothing else. A missing device node stays so until heal: nvidia-modprobe and
install don't make it, and containers that have it keep it.

To make calls of one NVML function fail, such as those that create MIG instances,
see fault. To break CUDA MPS, see mps.`

func breakCommand(t *target) *cobra.Command {
	b := breakage{}
	c := &cobra.Command{
		Use:   "break GPU... --root DIR [flags]",
		Short: "Break GPUs: XIDs, recovery action, memory, NVLink, lost, wedged, device nodes",
		Long:  breakHelp,
		Args:  cobra.MinimumNArgs(1),
		RunE: func(c *cobra.Command, args []string) error {
			b.changesECCErrors = c.Flags().Changed("ecc")
			if err := b.check(); err != nil {
				return err
			}
			return t.eachGPU(args, b.apply)
		},
	}
	f := c.Flags()
	f.UintSliceVar(&b.xids, "xid", nil, "XIDs to raise, in this order")
	f.IntVar(&b.gi, "gi", -1, "id of the GPU instance that the XIDs belong to (default: none)")
	f.IntVar(&b.ci, "ci", -1, "id of the compute instance in it (default: none)")
	f.Uint32Var(&b.pid, "pid", 0, "process that the kernel log names")
	f.StringVar(&b.name, "name", "", "its name")
	f.StringVar(&b.recovery, "recovery", "", "recovery action: "+strings.Join(recoveryActions(), ", "))
	f.StringVar(&b.remap, "remap", "", "row remapper: pending, failed or none")
	f.Uint64Var(&b.eccErrors, "ecc", 0, "number of uncorrectable errors of memory since the driver was loaded")
	f.BoolVar(&b.sram, "sram", false, "exceed the threshold of SRAM errors")
	f.StringVar(&b.nvlink, "nvlink", "", "NVLinks that are down: numbers such as 0,4, all or none")
	f.StringVar(&b.fabric, "fabric", "", "registration with Fabric Manager: not-started, in-progress, failed or ready")
	f.BoolVar(&b.lost, "lost", false, "fall off the bus")
	f.BoolVar(&b.wedged, "wedged", false, "let no call return")
	f.BoolVar(&b.resetRequired, "reset-required", false, "refuse calls until a reset")
	f.BoolVar(&b.modePends, "mig-mode-pends", false, "let a change of the MIG mode be pending until a reset")
	f.BoolVar(&b.noNode, "no-node", false, "lack the device node /dev/nvidiaN")
	f.BoolVar(&b.noCapabilities, "no-capabilities", false, "lack the device nodes for access to MIG instances, which the driver lists in /proc/driver/nvidia/capabilities")
	return c
}

func (b *breakage) check() error {
	if err := b.checkWhose(); err != nil {
		return err
	}
	words := b.recovery+b.remap+b.nvlink+b.fabric != ""
	flags := []bool{b.changesECCErrors, b.sram, b.lost, b.wedged, b.resetRequired, b.modePends, b.noNode, b.noCapabilities}
	if len(b.xids) == 0 && !words && !slices.Contains(flags, true) {
		return errors.New("break it how? For example --xid 31, --recovery reset or --lost; see --help")
	}
	return b.checkStates()
}

// checkStates checks the flags whose arguments are words.
func (b *breakage) checkStates() error {
	switch {
	case b.recovery != "" && !slices.Contains(recoveryActions(), b.recovery):
		return fmt.Errorf("--recovery %q: want one of %s", b.recovery, strings.Join(recoveryActions(), ", "))
	case !slices.Contains([]string{"", "pending", "failed", "none"}, b.remap):
		return fmt.Errorf("--remap %q: want pending, failed or none", b.remap)
	case b.fabric != "" && b.fabric != fabricReady && !slices.Contains(nvmlsim.FabricStates(), nvmlsim.FabricState(b.fabric)):
		return fmt.Errorf("--fabric %q: want not-started, in-progress, failed or ready", b.fabric)
	}
	return nil
}

// checkWhose checks the flags about whose error an XID is.
func (b *breakage) checkWhose() error {
	switch {
	case b.gi < 0 && b.ci >= 0:
		return errors.New("--ci needs --gi: which GPU instance is the compute instance in?")
	case len(b.xids) == 0 && (b.gi >= 0 || b.pid != 0 || b.name != ""):
		return errors.New("--gi, --pid and --name tell whose XID it is: which one? For example --xid 31")
	case b.pid == 0 && b.name != "":
		return errors.New("--name needs --pid")
	}
	return nil
}

// apply breaks a GPU: it sets the states, raises the XIDs, and then sets the recovery
// action.
func (b *breakage) apply(m *nvmlsim.Machine, gpu int) error {
	if err := b.applyState(m, gpu); err != nil {
		return err
	}
	if b.noNode || b.noCapabilities {
		have := m.State().GPUs[gpu]
		if err := driverroot.SetMissing(m, gpu, have.NodeMissing || b.noNode, have.CapabilitiesMissing || b.noCapabilities); err != nil {
			return fmt.Errorf("--no-node, --no-capabilities: %w", err)
		}
	}
	for i, code := range b.xids {
		if i > 0 {
			time.Sleep(time.Millisecond) // as on hardware
		}
		x := nvmlsim.XID{Code: uint64(code), GPUInstance: instance(b.gi), ComputeInstance: instance(b.ci), PID: b.pid, Name: b.name}
		if err := m.RaiseXID(gpu, x); err != nil {
			return err
		}
	}
	if b.recovery == "" {
		return nil
	}
	return m.SetRecoveryAction(gpu, nvmlsim.RecoveryAction(slices.Index(recoveryActions(), b.recovery)))
}

func (b *breakage) applyState(m *nvmlsim.Machine, gpu int) error {
	if b.lost {
		if err := m.Lose(gpu); err != nil {
			return err
		}
	}
	if b.remap != "" {
		if err := m.SetRemappedRows(gpu, b.remap == "pending", b.remap == "failed"); err != nil {
			return err
		}
	}
	if b.changesECCErrors {
		if err := m.SetUncorrectableErrors(gpu, b.eccErrors); err != nil {
			return err
		}
	}
	return b.applyFlags(m, gpu)
}

func (b *breakage) applyFlags(m *nvmlsim.Machine, gpu int) error {
	model, err := nvmlsim.FindModel(m.Description().GPUs[gpu].Model)
	if err != nil {
		return err
	}
	if model.MIG == nil && (b.modePends || b.noCapabilities) {
		return fmt.Errorf("--mig-mode-pends, --no-capabilities: %s has no MIG", model.ID)
	}
	return m.ChangeGPU(gpu, func(g *nvmlsim.GPUState) error {
		g.Wedged = g.Wedged || b.wedged
		g.ResetRequired = g.ResetRequired || b.resetRequired
		g.SRAMThresholdExceeded = g.SRAMThresholdExceeded || b.sram
		g.MIGModePends = g.MIGModePends || b.modePends
		if b.fabric != "" {
			g.Fabric = nvmlsim.FabricState(strings.TrimSuffix(b.fabric, fabricReady))
		}
		if b.nvlink == "" {
			return nil
		}
		var err error
		g.NVLinksDown, err = links(b.nvlink, model)
		return err
	})
}

// fabricReady is the argument of --fabric for nvmlsim.FabricReady.
const fabricReady = "ready"

func instance(id int) *uint32 {
	if id < 0 {
		return nil
	}
	n := uint32(id)
	return &n
}

// links reads the argument of --nvlink.
func links(arg string, model *nvmlsim.Model) ([]int, error) {
	count := 0
	if model.NVLink != nil {
		count = model.NVLink.Links
	}
	var down []int
	switch arg {
	case "none":
	case "all":
		for link := range count {
			down = append(down, link)
		}
	default:
		for part := range strings.SplitSeq(arg, ",") {
			link, err := strconv.Atoi(part)
			if err != nil || link < 0 || link >= count {
				return nil, fmt.Errorf("--nvlink %q: %s has %d NVLinks; want their numbers from 0 on, all or none", arg, model.ID, count)
			}
			down = append(down, link)
		}
	}
	return down, nil
}

func healCommand(t *target) *cobra.Command {
	return &cobra.Command{
		Use:   "heal [GPU...] --root DIR",
		Short: "Make broken GPUs healthy, at once",
		Long: `Takes back everything that break did, as no hardware can: also lost and wedged GPUs
answer again, and missing device nodes are there. What hardware does is reset, driver
unload and load, and reboot. What fault did ends with fault --clear.

    nvmlsim heal 3 --root DIR
    nvmlsim heal --root DIR       # all GPUs`,
		RunE: func(_ *cobra.Command, args []string) error {
			return t.do(func(m *nvmlsim.Machine) error {
				if len(args) == 0 {
					for pos := range m.Description().GPUs {
						args = append(args, strconv.Itoa(pos))
					}
				}
				return eachGPU(m, args, heal)
			})
		},
	}
}

func heal(m *nvmlsim.Machine, gpu int) error {
	if have := m.State().GPUs[gpu]; have.NodeMissing || have.CapabilitiesMissing {
		if err := driverroot.SetMissing(m, gpu, false, false); err != nil {
			return err
		}
	}
	return m.Heal(gpu)
}

func resetCommand(t *target) *cobra.Command {
	return &cobra.Command{
		Use:   "reset GPU... --root DIR",
		Short: "Reset idle GPUs, as nvidia-smi --gpu-reset does",
		Long: `Resets GPUs: MIG instances and modes are gone, a pending MIG mode is taken, pending
rows are remapped, NVLinks are up, and a recovery action that asks for a reset
is none again. It is refused while a process uses the GPU or has NVML open, for a
lost GPU, in a guest, and before Ampere for one of several GPUs with NVLinks. To
make it fail in another way, or hang (see fault):

    nvmlsim fault DeviceReset --gpu 0 --hang --root DIR`,
		Args: cobra.MinimumNArgs(1),
		RunE: func(_ *cobra.Command, args []string) error {
			return t.eachGPU(args, func(m *nvmlsim.Machine, gpu int) error {
				if err := m.GPUs()[gpu].ResetIdle(); err != nil {
					return fmt.Errorf("reset GPU %d: %w", gpu, err)
				}
				return nil
			})
		},
	}
}

// eachGPU runs a change for each of the named GPUs, by position.
func (t *target) eachGPU(names []string, change func(*nvmlsim.Machine, int) error) error {
	return t.do(func(m *nvmlsim.Machine) error { return eachGPU(m, names, change) })
}

func eachGPU(m *nvmlsim.Machine, names []string, change func(*nvmlsim.Machine, int) error) error {
	for _, name := range names {
		pos, err := position(m, name)
		if err != nil {
			return err
		}
		if err := change(m, pos); err != nil {
			return err
		}
	}
	return nil
}
