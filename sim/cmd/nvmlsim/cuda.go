package main

import (
	"errors"
	"fmt"
	"os/exec"
	"os/signal"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"github.com/spf13/cobra"

	"github.com/tessera-dra/tessera/sim/nvmlsim"
	"github.com/tessera-dra/tessera/sim/nvmlsim/mps"
)

func cudaCommand() *cobra.Command {
	var p mps.Program
	var alloc []string
	var hold, root string
	c := &cobra.Command{
		Use:   "cuda [--alloc SIZE]... [--load PERCENT] [--hold D] [--fault]",
		Short: "Use a GPU as a CUDA program does, through MPS if a daemon runs",
		Long: `Makes a CUDA context on the first GPU that a program would see here, and says
how that went, how many multiprocessors and how much memory it has. Then it
allocates memory, computes or not for a while, and may end by a fault:

    nvmlsim cuda --alloc 2048 --alloc 8G --load 80 --hold 10s

It goes by CUDA_VISIBLE_DEVICES and CUDA_MPS_PIPE_DIRECTORY as CUDA does: where an
MPS control daemon listens it is a client of its, with the daemon's limits or lower
ones of its own (CUDA_MPS_ACTIVE_THREAD_PERCENTAGE, CUDA_MPS_PINNED_DEVICE_MEM_LIMIT);
else it is on the GPU directly, unless the compute mode keeps it away.

It finds the machine by the nvidia-smi of its PATH, so in a container that was
given a GPU. The exit code is 1 where the context could not be made or was lost; a
failed allocation is printed only.`,
		Args: cobra.NoArgs,
		RunE: func(c *cobra.Command, _ []string) error {
			for _, a := range alloc {
				n, err := mps.ParseAlloc(a)
				if err != nil {
					return fmt.Errorf("--alloc: %w", err)
				}
				p.Alloc = append(p.Alloc, n)
			}
			var err error
			if p.Hold, err = parseHold(hold); err != nil {
				return err
			}
			ctx, stop := signal.NotifyContext(c.Context(), syscall.SIGTERM, syscall.SIGINT)
			defer stop()
			return p.Run(ctx, c.OutOrStdout(), func() (*nvmlsim.Machine, error) { return openForCUDA(root) })
		},
	}
	c.Flags().StringArrayVar(&alloc, "alloc", nil, "memory to allocate: MiB, or with K, M or G; may be repeated")
	c.Flags().Uint32Var(&p.Load, "load", 0, "percentage of the time in which it computes while it keeps running")
	c.Flags().StringVar(&hold, "hold", "", "time to keep running, such as 10s, or \"forever\", until SIGTERM")
	c.Flags().BoolVar(&p.Fault, "fault", false, "end with an illegal memory access, which affects all clients of an MPS server")
	c.Flags().IntVar(&p.Device, "device", 0, "index of the GPU among the visible ones")
	c.Flags().StringVar(&p.Tag, "tag", "cuda", "first word of each line")
	c.Flags().StringVar(&root, "root", "", "driver root of the machine (default: that of nvidia-smi in PATH)")
	return c
}

func parseHold(s string) (time.Duration, error) {
	switch s {
	case "":
		return 0, nil
	case "forever":
		return -1, nil
	}
	d, err := time.ParseDuration(s)
	if err != nil || d <= 0 {
		return 0, fmt.Errorf("--hold: %q is neither a duration such as 10s nor \"forever\"", s)
	}
	return d, nil
}

// openForCUDA opens the machine at a root, or the one of this program.
func openForCUDA(root string) (*nvmlsim.Machine, error) {
	if root != "" {
		return nvmlsim.Open(filepath.Join(root, nvmlsim.StateFile))
	}
	m, err := openOwn()
	if err == nil {
		return m, nil
	}
	smi, lookErr := exec.LookPath("nvidia-smi")
	if lookErr != nil {
		return nil, errors.Join(err, lookErr)
	}
	return nvmlsim.OpenInstalled(smi)
}

func mpsCommand(t *target) *cobra.Command {
	c := &cobra.Command{
		Use:   "mps",
		Short: "Break CUDA MPS",
		Long: `Kills MPS, or lets its start fail or take long:

    nvmlsim mps kill server --root DIR                 # the next client gets another one
    nvmlsim mps kill control --root DIR                # its server and clients die with it
    nvmlsim fault MPSControl --code 999 --root DIR     # no control daemon starts
    nvmlsim fault MPSServer --delay-ms 5000 --root DIR # servers take long to start
    nvmlsim fault MPSServer --gpu 3 --hang --root DIR  # no server of this GPU gets ready, until fault --clear
    nvmlsim fault MPSCommand --delay-ms 60000 --count 1 --root DIR   # a command hangs`,
	}
	c.AddCommand(&cobra.Command{
		Use:       "kill control|server|all --root DIR",
		Short:     "Kill all MPS control daemons, servers or both of the machine, as SIGKILL does",
		Args:      cobra.MatchAll(cobra.ExactArgs(1), cobra.OnlyValidArgs),
		ValidArgs: []string{"control", "server", "all"},
		RunE: func(_ *cobra.Command, args []string) error {
			return t.do(func(m *nvmlsim.Machine) error {
				return m.KillMPS(!strings.HasPrefix(args[0], "s"), args[0] != "control")
			})
		},
	})
	return c
}
