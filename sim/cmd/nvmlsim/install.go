package main

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"

	"github.com/spf13/cobra"

	"github.com/tessera-dra/tessera/sim/nvmlsim"
	"github.com/tessera-dra/tessera/sim/nvmlsim/driverroot"
)

func installCommand() *cobra.Command {
	var machine, name string
	o := driverroot.Options{}
	c := &cobra.Command{
		Use:   "install --root DIR --machine 8xh100-80gb",
		Short: "Install the driver root of a simulated machine",
		Long: `Lays out a driver root: versioned libraries, nvidia-smi, device nodes, and the
parts of /proc and /sys that an NVIDIA driver makes. Point a program at it as its
driver root, or run DIR/usr/bin/nvidia-smi.

The machine is given in short (8xh100-80gb, or 4xa30,4xl40s) or as a YAML file:

    driverVersion: 580.159.04     # default
    cudaVersion: "13.0"           # default
    minorsMove: true              # a GPU's /dev/nvidiaN is another after a switch of its MIG mode; default: it stays
    wsl: true                     # Windows Subsystem for Linux: /dev/dxg in place of device nodes; default: not
    gpus:
    - {model: h100-80gb, count: 8}
    - {model: a100-40gb, count: 2, migEnabled: true}
    - {model: a30, count: 4, nvlink: pairs}  # or none, mesh, switch; default: as the model's boards

UUIDs, serial numbers and PCI addresses follow from the node's name: the same name
gives the same machine, another name another one.

Platforms have the driver in different places. This is the one of Talos Linux 1.13,
on a machine whose /proc/driver, /proc/devices, /sys/devices, /sys/bus/pci/devices,
/sys/module and /dev are its own; no other machine may have --kernel / or --root /:

    nvmlsim install --root / --libraries usr/local/lib --programs usr/local/bin --kernel / --machine 2xl4

There the driver's lines are added to /proc/devices, and /dev/kmsg becomes a file,
until uninstall.

It may be run again: what is there is put right, and the machine's state (faults,
lost GPUs, MIG instances) is kept as long as the machine is the same one. Needs
root (device nodes).`,
		Args: cobra.NoArgs,
		RunE: func(c *cobra.Command, _ []string) error {
			if err := complete(&o, machine, name); err != nil {
				return err
			}
			if err := driverroot.Install(o); err != nil {
				return err
			}
			_, err := fmt.Fprintf(c.OutOrStdout(), "driver %s with %d GPUs installed under %s\n", o.Machine.DriverVersion, len(o.Machine.GPUs), o.Root)
			return err
		},
	}
	c.Flags().StringVar(&machine, "machine", "", "machine file, or short form such as 8xh100-80gb")
	c.Flags().StringVar(&name, "node-name", "", "name from which UUIDs are derived (default: the machine file's name)")
	installFlags(c, &o)
	return c
}

// installFlags adds the flags of install and serve.
func installFlags(c *cobra.Command, o *driverroot.Options) {
	c.Flags().StringVar(&o.Root, "root", "", "driver root to create, e.g. /run/nvidia/driver")
	c.Flags().StringVar(&o.Libraries, "libraries", "", "directory of the libraries in the root (default: "+driverroot.LibraryDir()+")")
	c.Flags().StringVar(&o.Programs, "programs", "", "directory of the programs in the root (default: usr/bin)")
	c.Flags().StringVar(&o.Kernel, "kernel", "", "directory whose dev, proc and sys get device nodes and the kernel's files (default: the root)")
	c.Flags().StringVar(&o.Library, "library", "", "built library (default: libnvidia-ml.so.1 beside this program)")
	must(c.MarkFlagRequired("root"), c.MarkFlagRequired("machine"))
}

// complete sets the options that follow from the flags: the parsed machine,
// this program as nvidia-smi, and the library in the same directory.
func complete(o *driverroot.Options, machine, name string) (err error) {
	if o.Machine, err = readMachine(machine, name); err != nil {
		return err
	}
	if o.SMI, err = os.Executable(); err != nil {
		return fmt.Errorf("find this program: %w", err)
	}
	if o.Library == "" {
		o.Library = filepath.Join(filepath.Dir(o.SMI), "libnvidia-ml.so.1")
	}
	if _, err := os.Stat(o.Library); errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("library %s does not exist; build it with \"go run ./sim/cmd/nvmlsim/lib %[1]s\" or name it with --library", o.Library)
	}
	return nil
}

// must panics on an error, which can only be a mistake in this program.
func must(errs ...error) {
	if err := errors.Join(errs...); err != nil {
		panic(err)
	}
}

// readMachine reads a machine from the file arg if it exists, otherwise from
// the short form.
func readMachine(arg, name string) (nvmlsim.Description, error) {
	text, err := os.ReadFile(arg)
	if errors.Is(err, fs.ErrNotExist) && filepath.Ext(arg) == "" {
		text, err = []byte(arg), nil
	}
	if err != nil {
		return nvmlsim.Description{}, fmt.Errorf("machine file: %w", err)
	}
	spec, err := nvmlsim.ParseSpec(text)
	if err != nil {
		return nvmlsim.Description{}, err
	}
	return nvmlsim.Describe(spec, name)
}

func uninstallCommand() *cobra.Command {
	var root string
	c := &cobra.Command{
		Use:   "uninstall --root DIR",
		Short: "Remove the files that install has created, and no others",
		Args:  cobra.NoArgs,
		RunE:  func(*cobra.Command, []string) error { return driverroot.Uninstall(root) },
	}
	c.Flags().StringVar(&root, "root", "", "driver root of the installation")
	must(c.MarkFlagRequired("root"))
	return c
}
