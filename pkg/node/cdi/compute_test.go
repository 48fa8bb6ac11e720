package cdi_test

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/tessera-dra/tessera/pkg/gpu"
	"github.com/tessera-dra/tessera/pkg/node/holding"
)

func TestMissingDeviceNode(t *testing.T) {
	for name, node := range map[string]string{
		"of the GPU":     "nvidia0",
		"unified memory": "nvidia-uvm",
		"control":        "nvidiactl",
	} {
		t.Run(name, func(t *testing.T) {
			s, driver, _ := setUp(t)
			path := filepath.Join(installed.Host, installed.Root, "dev", node)
			aside := path + ".aside"
			if err := os.Rename(path, aside); err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() { os.Rename(aside, path) })
			if err := s.SetDriver(driver); err != nil {
				t.Fatal(err)
			}
			_, err := s.Write(devices(t, driver, "claim-1", 0))
			if want := filepath.Join(installed.Root, "dev", node); err == nil || !strings.Contains(err.Error(), want) {
				t.Fatalf("without %s: got %v, want an error that names it", want, err)
			}
			if claims, _ := s.Claims(); len(claims) != 0 {
				t.Errorf("a failed write left specifications of %v", claims)
			}
			if err := os.Rename(aside, path); err != nil {
				t.Fatal(err)
			}
			if _, err := s.Write(devices(t, driver, "claim-1", 0)); err != nil {
				t.Errorf("with the node there: %v", err)
			}
		})
	}
}

func TestNodeThatVanishedAfterwards(t *testing.T) {
	s, driver, _ := setUp(t)
	if err := s.SetDriver(driver); err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(installed.Host, installed.Root, "dev/nvidia2")
	aside := path + ".aside"
	if err := os.Rename(path, aside); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.Rename(aside, path) })
	if _, err := s.Write(devices(t, driver, "claim-1", 2)); err == nil {
		t.Error("the GPU without a device node was given")
	}
	if _, err := s.Write(devices(t, driver, "claim-2", 1)); err != nil {
		t.Errorf("the other GPUs suffer: %v", err)
	}
}

func TestDriverReloadedWithOtherMajor(t *testing.T) {
	s, driver, dir := setUp(t)
	if err := s.SetDriver(driver); err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(installed.Host, installed.Root, "dev/nvidia-uvm")
	aside := path + ".aside"
	if err := os.Rename(path, aside); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.Rename(aside, path) })
	if err := unix.Mknod(path, unix.S_IFCHR|0o666, int(unix.Mkdev(511, 0))); err != nil {
		t.Fatal(err)
	}
	ids, err := s.Write(devices(t, driver, "claim-1", 0))
	if err != nil {
		t.Fatal(err)
	}
	for _, of := range ids {
		for _, d := range inject(t, dir, of).Linux.Devices {
			if d.Path == "/dev/nvidia-uvm" && d.Major != 511 {
				t.Errorf("a container would get %s %d:%d", d.Path, d.Major, d.Minor)
			}
		}
	}
}

func TestDriverFileGone(t *testing.T) {
	s, driver, _ := setUp(t)
	if err := s.SetDriver(driver); err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(installed.Host, installed.Root, "usr/lib/x86_64-linux-gnu/libnvidia-opencl.so.580.159.04")
	aside := path + ".aside"
	if err := os.Rename(path, aside); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.Rename(aside, path) })
	// The library is optional: the files are searched again.
	if _, err := s.Write(devices(t, driver, "claim-1", 0)); err != nil {
		t.Errorf("an optional library that went away: %v", err)
	}
}

func TestUnknownGPU(t *testing.T) {
	s, driver, _ := setUp(t)
	if err := s.SetDriver(driver); err != nil {
		t.Fatal(err)
	}
	unknown := gpu.UUID("GPU-00000000-0000-0000-0000-000000000000")
	_, err := s.Write(holding.Realized{Record: holding.Record{ClaimUID: "claim-1", Holdings: []holding.Holding{holding.New("gpu-00000000", gpu.Whole{GPU: unknown})}}})
	if err == nil || !strings.Contains(err.Error(), string(unknown)) {
		t.Errorf("got %v, want an error that names the GPU", err)
	}
}

// TestMinorMoves checks that a container gets the GPU's current device node.
func TestMinorMoves(t *testing.T) {
	s, d, dir := setUp(t)
	if err := s.SetDriver(d); err != nil {
		t.Fatal(err)
	}
	first, second := d.GPUs[0], d.GPUs[1]
	if err := s.SetMinor(first.UUID, second.Minor); err != nil {
		t.Fatal(err)
	}
	ids, err := s.Write(devices(t, d, "moved", 0))
	if err != nil {
		t.Fatal(err)
	}
	for name := range ids {
		got := paths(inject(t, dir, ids[name]))
		if !slices.Contains(got, fmt.Sprintf("/dev/nvidia%d", second.Minor)) || slices.Contains(got, fmt.Sprintf("/dev/nvidia%d", first.Minor)) {
			t.Errorf("%s: %v, want /dev/nvidia%d", name, got, second.Minor)
		}
	}
}
