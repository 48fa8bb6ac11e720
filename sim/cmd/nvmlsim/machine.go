package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"text/tabwriter"

	"github.com/spf13/cobra"

	"github.com/tessera-dra/tessera/sim/nvmlsim"
)

func newCommand() *cobra.Command {
	root := &cobra.Command{
		Use:   "nvmlsim",
		Short: "NVIDIA GPUs without hardware",
		Long: `nvmlsim simulates a machine with NVIDIA GPUs. Start with

    nvmlsim models                                        # what GPUs there are
    nvmlsim install --root /tmp/gpus --machine 8xh100-80gb
    /tmp/gpus/usr/bin/nvidia-smi                          # look at it
    nvmlsim break 3 --lost --root /tmp/gpus               # see break --help for others
    nvmlsim heal 3 --root /tmp/gpus
    nvmlsim uninstall --root /tmp/gpus

GPUs are named by the number N of /dev/nvidiaN that they boot with, UUID or PCI address.`,
		SilenceUsage:  true,
		SilenceErrors: true,
	}
	m := &target{}
	machine := []*cobra.Command{stateCommand(m), faultCommand(m), latencyCommand(m), processCommand(m), breakCommand(m), healCommand(m), resetCommand(m), rebootCommand(m), driverCommand(m), mpsCommand(m)}
	for _, c := range machine {
		c.PersistentFlags().StringVar(&m.root, "root", "", "driver root of the machine (default: the state file in $"+nvmlsim.StateEnv+")")
	}
	root.AddCommand(installCommand(), uninstallCommand(), serveCommand(), modelsCommand(), cudaCommand())
	root.AddCommand(machine...)
	return root
}

// target is the machine of a command.
type target struct{ root string }

// do opens the machine, runs a change and closes it.
func (t *target) do(change func(*nvmlsim.Machine) error) (err error) {
	path := os.Getenv(nvmlsim.StateEnv)
	if t.root != "" {
		path = filepath.Join(t.root, nvmlsim.StateFile)
	}
	if path == "" {
		return errors.New("which machine? Set --root DIR")
	}
	m, err := nvmlsim.Open(path)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, m.Close()) }()
	return change(m)
}

// position finds a GPU by number, UUID or PCI address.
func position(m *nvmlsim.Machine, name string) (int, error) {
	for pos, id := range m.Description().GPUs {
		if name == strconv.Itoa(id.Minor) || name == id.UUID || strings.EqualFold(name, id.BusID) {
			return pos, nil
		}
	}
	return 0, fmt.Errorf("the machine has no GPU %q; name it by number (0 to %d), UUID or PCI address", name, len(m.Description().GPUs)-1)
}

func stateCommand(t *target) *cobra.Command {
	return &cobra.Command{
		Use:   "state --root DIR",
		Short: "Show everything about the machine, as JSON",
		Args:  cobra.NoArgs,
		RunE: func(c *cobra.Command, _ []string) error {
			return t.do(func(m *nvmlsim.Machine) error {
				e := json.NewEncoder(c.OutOrStdout())
				e.SetIndent("", "  ")
				return e.Encode(m.State())
			})
		},
	}
}

const faultHelp = `Makes calls of an NVML function fail, take long, or both, until used up or cleared,
or keeps them from returning until cleared:

    nvmlsim fault DeviceGetFieldValues --code 3 --root DIR          # an old driver without them
    nvmlsim fault EventSetWait --code 999 --count 1 --root DIR      # once, unknown error
    nvmlsim fault '*' --delay-ms 200 --root DIR                     # everything is slow
    nvmlsim fault DeviceGetMigMode --gpu 3 --hang --root DIR        # this call never returns
    nvmlsim fault --clear --root DIR
    nvmlsim fault --clear --gpu 3 --root DIR                        # the faults of this GPU only

A GPU that refuses MIG instances, or a change of its MIG mode:

    nvmlsim fault DeviceCreateGpuInstanceWithPlacement --gpu 3 --code 999 --root DIR
    nvmlsim fault DeviceCreateGpuInstance --gpu 3 --profile 3g.40gb --start 4 --code 999 --count 2 --root DIR
    nvmlsim fault GpuInstanceCreateComputeInstance --gpu 3 --code 23 --root DIR
    nvmlsim fault DeviceSetMigMode --gpu 3 --code 999 --root DIR    # for a mode that is pending, see break

To break a GPU, rather than calls, see break. CALL is the function's name without nvml and version; '*' is every one.
With --profile or --start, DeviceCreateGpuInstance is also the function WithPlacement.`

func faultCommand(t *target) *cobra.Command {
	f := nvmlsim.Fault{GPU: nvmlsim.AnyGPU}
	var gpu string
	var code int32
	var start uint32
	var clear bool
	c := &cobra.Command{
		Use:   "fault CALL --root DIR [--gpu GPU] [--profile P] [--start N] [--code N] [--delay-ms N] [--count N] [--hang]",
		Short: "Make NVML calls fail, take long or never return",
		Long:  faultHelp,
		Args:  cobra.MaximumNArgs(1),
		RunE: func(c *cobra.Command, args []string) error {
			if c.Flags().Changed("start") {
				f.Start = &start
			}
			f.Code = nvmlsim.Return(code)
			return t.do(func(m *nvmlsim.Machine) error {
				var err error
				if gpu != "" {
					if f.GPU, err = position(m, gpu); err != nil {
						return err
					}
				}
				switch {
				case clear && f.GPU != nvmlsim.AnyGPU:
					return m.ClearFaultsOf(f.GPU)
				case clear:
					return m.ClearFaults()
				case len(args) == 0:
					return errors.New("which call? For example: nvmlsim fault DeviceGetUUID --code 15")
				}
				f.Call = args[0]
				return m.Fault(f)
			})
		},
	}
	c.Flags().StringVar(&gpu, "gpu", "", "only for this GPU (default: all)")
	c.Flags().StringVar(&f.Profile, "profile", "", "only creating MIG instances of this profile, such as 3g.40gb (default: all)")
	c.Flags().Uint32Var(&start, "start", 0, "only creating MIG instances at this memory slice (default: all)")
	c.Flags().Int32Var(&code, "code", 0, "NVML return code; 0 delays only")
	c.Flags().IntVar(&f.DelayMS, "delay-ms", 0, "milliseconds to wait at the start of the call")
	c.Flags().IntVar(&f.Count, "count", 0, "number of calls that fail; 0 is all, until cleared")
	c.Flags().BoolVar(&f.Hang, "hang", false, "keep calls from returning until cleared")
	c.Flags().BoolVar(&clear, "clear", false, "remove all faults, and load the driver; with --gpu, only the faults of that GPU")
	return c
}

func latencyCommand(t *target) *cobra.Command {
	var l nvmlsim.Latency
	c := &cobra.Command{
		Use:   "latency realistic|none|--create D --destroy D --mode D --root DIR",
		Short: "Make MIG calls take as long as on hardware (assumed)",
		Long: `Makes the calls that change MIG wait, in place of the latency that was set before:

    nvmlsim latency realistic --root DIR                        # create 200ms, destroy 1s, mode 2s, init 10ms
    nvmlsim latency --create 200ms --destroy 1s --root DIR      # of a GPU instance with its compute instance
    nvmlsim latency none --root DIR

What realistic sets is an assumption: nobody has published measurements.`,
		Args:      cobra.MatchAll(cobra.MaximumNArgs(1), cobra.OnlyValidArgs),
		ValidArgs: []string{"realistic", "none"},
		RunE: func(c *cobra.Command, args []string) error {
			given := c.Flags().Changed("create") || c.Flags().Changed("destroy") || c.Flags().Changed("mode")
			if given == (len(args) == 1) {
				return errors.New("which latency? Set realistic, none, or durations: nvmlsim latency --create 200ms --destroy 1s")
			}
			if len(args) == 1 && args[0] == "realistic" {
				l = nvmlsim.RealisticLatency()
			}
			return t.do(func(m *nvmlsim.Machine) error { return m.SetLatency(l) })
		},
	}
	c.Flags().DurationVar(&l.Create, "create", 0, "time to create a GPU instance and its compute instance")
	c.Flags().DurationVar(&l.Destroy, "destroy", 0, "time to destroy both")
	c.Flags().DurationVar(&l.Mode, "mode", 0, "time to switch the MIG mode")
	return c
}

func processCommand(t *target) *cobra.Command {
	c := &cobra.Command{
		Use:   "process",
		Short: "Add and remove processes that use GPUs and MIG devices",
	}
	c.AddCommand(addProcessCommand(t), removeProcessCommand(t))
	return c
}

func addProcessCommand(t *target) *cobra.Command {
	var gpu string
	var memoryMiB uint32
	var p nvmlsim.Process
	var gi, ci int
	c := &cobra.Command{
		Use:   "add --gpu GPU [--gi ID --ci ID] --pid PID [--name NAME] [--memory MIB] [--load PERCENT] --root DIR",
		Short: "Add a process to a GPU, or to a MIG device of it",
		Long: `Adds a process. What it uses can't be destroyed, and the GPU's MIG mode can't be
switched, until it is removed (or the machine reboots):

    nvmlsim process add --gpu 0 --pid 4711 --name train --memory 40960 --load 75 --root DIR
    nvmlsim process add --gpu 0 --gi 11 --ci 0 --pid 4712 --root DIR`,
		Args: cobra.NoArgs,
		RunE: func(*cobra.Command, []string) error {
			p.UsedMemory, p.GPUInstance, p.ComputeInstance = uint64(memoryMiB)<<20, nvmlsim.NoInstance, nvmlsim.NoInstance
			if gi >= 0 {
				p.GPUInstance, p.ComputeInstance = uint32(gi), uint32(max(ci, 0))
			} else if ci >= 0 {
				return errors.New("--ci needs --gi: which GPU instance is the compute instance in?")
			}
			return t.do(func(m *nvmlsim.Machine) error {
				pos, err := position(m, gpu)
				if err != nil {
					return err
				}
				return m.AddProcess(pos, p)
			})
		},
	}
	c.Flags().StringVar(&gpu, "gpu", "", "the GPU")
	c.Flags().IntVar(&gi, "gi", -1, "id of the GPU instance (default: the whole GPU)")
	c.Flags().IntVar(&ci, "ci", -1, "id of the compute instance in it (default 0)")
	c.Flags().Uint32Var(&p.PID, "pid", 0, "process id")
	c.Flags().StringVar(&p.Name, "name", "", "its name in nvidia-smi")
	c.Flags().Uint32Var(&memoryMiB, "memory", 0, "GPU memory it uses, in MiB")
	c.Flags().Uint32Var(&p.Utilization, "load", 0, "percentage of the time in which it computes")
	must(c.MarkFlagRequired("gpu"), c.MarkFlagRequired("pid"))
	return c
}

func removeProcessCommand(t *target) *cobra.Command {
	var gpu string
	var pid uint32
	c := &cobra.Command{
		Use:   "remove --gpu GPU --pid PID --root DIR",
		Short: "End a process on a GPU",
		Args:  cobra.NoArgs,
		RunE: func(*cobra.Command, []string) error {
			return t.do(func(m *nvmlsim.Machine) error {
				pos, err := position(m, gpu)
				if err != nil {
					return err
				}
				return m.RemoveProcess(pos, pid)
			})
		},
	}
	c.Flags().StringVar(&gpu, "gpu", "", "the GPU")
	c.Flags().Uint32Var(&pid, "pid", 0, "process id")
	must(c.MarkFlagRequired("gpu"), c.MarkFlagRequired("pid"))
	return c
}

func rebootCommand(t *target) *cobra.Command {
	return &cobra.Command{
		Use:   "reboot --root DIR",
		Short: "Reboot: reset volatile state such as MIG instances, modes and broken GPUs",
		Args:  cobra.NoArgs,
		RunE:  func(*cobra.Command, []string) error { return t.do((*nvmlsim.Machine).Reboot) },
	}
}

func driverCommand(t *target) *cobra.Command {
	return &cobra.Command{
		Use:       "driver load|unload --root DIR",
		Short:     "Load or unload the driver (nvmlInit answers Driver Not Loaded); loading resets the GPUs",
		Args:      cobra.MatchAll(cobra.ExactArgs(1), cobra.OnlyValidArgs),
		ValidArgs: []string{"load", "unload"},
		RunE: func(_ *cobra.Command, args []string) error {
			return t.do(func(m *nvmlsim.Machine) error { return m.LoadDriver(args[0] == "load") })
		},
	}
}

func modelsCommand() *cobra.Command {
	return &cobra.Command{
		Use:   "models [MODEL]",
		Short: "List the GPU models, or show one with its MIG profiles and sources",
		Args:  cobra.MaximumNArgs(1),
		RunE: func(c *cobra.Command, args []string) error {
			w := tabwriter.NewWriter(c.OutOrStdout(), 0, 0, 2, ' ', 0)
			if len(args) == 1 {
				m, err := nvmlsim.FindModel(args[0])
				if err != nil {
					return err
				}
				printModel(w, m)
				return w.Flush()
			}
			models, err := nvmlsim.Models()
			if err != nil {
				return err
			}
			fmt.Fprintln(w, "MODEL\tNAME\tMEMORY\tMIG PROFILES")
			for _, m := range models {
				fmt.Fprintf(w, "%s\t%s\t%d MiB\t%s\n", m.ID, m.ProductName, m.MemoryMiB, profileNames(m))
			}
			return w.Flush()
		},
	}
}

func profileNames(m *nvmlsim.Model) string {
	if m.MIG == nil {
		return "-"
	}
	names := make([]string, len(m.MIG.Profiles))
	for i, p := range m.MIG.Profiles {
		names[i] = p.Name
	}
	return strings.Join(names, " ")
}

func printModel(w *tabwriter.Writer, m *nvmlsim.Model) {
	fmt.Fprintf(w, "%s\t%s, %s, CUDA %s, %d MiB\n", m.ID, m.ProductName, m.Architecture, m.CUDAComputeCapability, m.MemoryMiB)
	if m.MIG != nil {
		fmt.Fprintln(w, "PROFILE\tID\tMEMORY\tSM\tCE\tDEC\tENC\tJPEG\tOFA\tMAX\tPLACEMENTS")
		for _, p := range m.MIG.Profiles {
			fmt.Fprintf(w, "%s\t%d\t%d MiB\t%d\t%d\t%d\t%d\t%d\t%d\t%d\t%v:%d\n", p.Name, p.ID, p.MemorySizeMB,
				p.MultiprocessorCount, p.CopyEngineCount, p.DecoderCount, p.EncoderCount, p.JPEGCount, p.OFACount, p.InstanceCount, p.Starts, p.Size)
		}
	}
	for _, s := range m.Sources {
		fmt.Fprintln(w, "source:\t"+s)
	}
	for _, s := range m.Assumptions {
		fmt.Fprintln(w, "assumed:\t"+s)
	}
}
