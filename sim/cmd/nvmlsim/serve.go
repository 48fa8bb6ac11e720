package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/signal"
	"path/filepath"
	"slices"
	"syscall"
	"time"

	"github.com/spf13/cobra"

	"github.com/tessera-dra/tessera/sim/nvmlsim"
	"github.com/tessera-dra/tessera/sim/nvmlsim/driverroot"
)

// anyNode is the file name of the default machine in a directory of machines.
// No node can have this name.
const anyNode = "_default"

func serveCommand() *cobra.Command {
	var machine, name string
	o := driverroot.Options{}
	c := &cobra.Command{
		Use:   "serve --root DIR --machine FILE --node-name NAME",
		Short: "Install, wait for SIGTERM or SIGINT, and uninstall",
		Long: `Does what install does, waits for SIGTERM or SIGINT, and does what uninstall does:
a driver for as long as this process runs, as a DaemonSet wants it.

As a real driver can't be unloaded while it is in use, the machine stays as it is
when it still has MIG instances, MPS servers or other stand-ins of CUDA programs
five seconds after the signal: the next serve or install goes on with it, and
uninstall removes it.

The machine may also be given as a directory: then it is the file in it that is
named after the node, or else the file ` + anyNode + `.`,
		Args: cobra.NoArgs,
		RunE: func(c *cobra.Command, _ []string) error {
			ctx, stop := signal.NotifyContext(c.Context(), syscall.SIGTERM, syscall.SIGINT)
			defer stop()
			file, err := machineOf(machine, name)
			if err != nil {
				return err
			}
			if err := complete(&o, file, name); err != nil {
				return err
			}
			return serve(ctx, o, patience, c.OutOrStdout())
		},
	}
	c.Flags().StringVar(&machine, "machine", "", "machine file, directory of machine files, or short form such as 8xh100-80gb")
	c.Flags().StringVar(&name, "node-name", "", "name from which UUIDs are derived (default: the machine file's name)")
	installFlags(c, &o)
	return c
}

// patience is the time to wait at the end for the machine's users.
const patience = 5 * time.Second

// serve installs the driver root, prints a message, waits for ctx to end, and uninstalls, unless MIG
// instances or simulated CUDA programs exist after patience. It also removes the files of a failed
// installation.
func serve(ctx context.Context, o driverroot.Options, patience time.Duration, out io.Writer) error {
	if err := driverroot.Install(o); err != nil {
		return errors.Join(err, driverroot.Uninstall(o.Root))
	}
	fmt.Fprintf(out, "driver %s with %d GPUs installed under %s\n", o.Machine.DriverVersion, len(o.Machine.GPUs), o.Root)
	<-ctx.Done()
	if inUse(o.Root, time.Now().Add(patience)) {
		fmt.Fprintf(out, "the machine has MIG instances or running CUDA programs, so it stays under %s\n", o.Root)
		return nil
	}
	return driverroot.Uninstall(o.Root)
}

// inUse reports whether the machine still has MIG instances or programs that
// use its GPUs at the deadline. It returns false as soon as there are none, or
// if the machine can't be read.
func inUse(root string, deadline time.Time) bool {
	m, err := nvmlsim.Open(filepath.Join(root, nvmlsim.StateFile))
	if err != nil {
		return false
	}
	defer m.Close()
	poll := time.NewTicker(100 * time.Millisecond)
	defer poll.Stop()
	for hasInstances(m.State()) || m.Held() {
		if time.Now().After(deadline) {
			return true
		}
		<-poll.C
	}
	return false
}

// hasInstances ignores the instances of lost GPUs, which can't be destroyed.
func hasInstances(s *nvmlsim.State) bool {
	return s != nil && slices.ContainsFunc(s.GPUs, func(g nvmlsim.GPUState) bool { return !g.Lost && len(g.Instances) > 0 })
}

// machineOf returns the node's file if arg is a directory of machines.
func machineOf(arg, node string) (string, error) {
	info, err := os.Stat(arg)
	if err != nil || !info.IsDir() {
		return arg, nil //nolint:nilerr // a file or a short form, which is for others to read
	}
	for _, name := range []string{node, anyNode} {
		file := filepath.Join(arg, name)
		if name == "" {
			continue
		}
		if _, err := os.Stat(file); err == nil || !errors.Is(err, fs.ErrNotExist) {
			return file, err
		}
	}
	return "", fmt.Errorf("%s has no machine for node %q: neither a file of that name nor %s", arg, node, anyNode)
}
