package main

import (
	"fmt"
	"os"
	"os/exec"
	"path"
	"path/filepath"
	"slices"
	"strings"

	"golang.org/x/tools/cover"
)

// sample is a prepare of one device, as hack/preparefiles ran it.
type sample struct {
	files []string // of the project that it runs through, by their paths in the module
	lines int      // of these files
	ways  []way
}

// packages returns the packages of the files.
func (s *sample) packages() []string {
	var all []string
	for _, file := range s.files {
		all = append(all, path.Dir(file))
	}
	slices.Sort(all)
	return slices.Compact(all)
}

// prepares builds hack/preparefiles of the module at dir, and counts what it runs through when it
// prepares a whole GPU and an MPS share.
func prepares(dir string) ([]count, error) {
	work, err := os.MkdirTemp("", "joints")
	if err != nil {
		return nil, fmt.Errorf("make a directory: %w", err)
	}
	defer os.RemoveAll(work)
	module, err := command(dir, "go", "list", "-m")
	if err != nil {
		return nil, err
	}
	program := filepath.Join(work, "preparefiles")
	if _, err := command(dir, "go", "build", "-cover", "-covermode", "atomic", "-coverpkg", "./pkg/...,./hack/preparefiles", "-o", program, "./hack/preparefiles"); err != nil {
		return nil, err
	}
	whole, err := prepare(dir, module, program, filepath.Join(work, "whole"), "")
	if err != nil {
		return nil, err
	}
	share, err := prepare(dir, module, program, filepath.Join(work, "share"), "-mps4-0")
	if err != nil {
		return nil, err
	}
	toNVML, err := first(whole.ways, "call of NVML", way.callsNVML)
	if err != nil {
		return nil, err
	}
	toFile, err := first(whole.ways, "write of a CDI file", way.writesCDI)
	if err != nil {
		return nil, err
	}
	return []count{
		{"files of a whole GPU", len(whole.files), whole.files},
		{"packages of a whole GPU", len(whole.packages()), whole.packages()},
		{"lines of these files", whole.lines, nil},
		{"files of a share", len(share.files), share.files},
		{"packages of a share", len(share.packages()), share.packages()},
		{"lines of the share's files", share.lines, nil},
		{"calls down to NVML", len(toNVML), toNVML},
		{"calls down to the CDI file", len(toFile), toFile},
	}, nil
}

// prepare prepares the device with this suffix. out is a directory for what the program writes.
func prepare(dir, module, program, out, suffix string) (*sample, error) {
	if err := os.Mkdir(out, 0o755); err != nil {
		return nil, fmt.Errorf("make a directory: %w", err)
	}
	// The coverage of the rest of its run goes to the directory around out.
	if _, err := command(dir, "env", "GOCOVERDIR="+filepath.Dir(out), program, out, suffix); err != nil {
		return nil, err
	}
	profile := out + ".cov"
	if _, err := command(dir, "go", "tool", "covdata", "textfmt", "-i="+out, "-o="+profile); err != nil {
		return nil, err
	}
	s := &sample{}
	var err error
	if s.files, err = covered(profile, module); err != nil {
		return nil, err
	}
	for _, file := range s.files {
		n, err := linesOf(filepath.Join(dir, file))
		if err != nil {
			return nil, err
		}
		s.lines += n
	}
	trace, err := os.Open(filepath.Join(out, "trace"))
	if err != nil {
		return nil, fmt.Errorf("open the trace: %w", err)
	}
	defer trace.Close()
	s.ways, err = ways(trace, module)
	return s, err
}

// command runs a command in a directory and returns its output.
func command(dir string, arguments ...string) (string, error) {
	cmd := exec.Command(arguments[0], arguments[1:]...)
	cmd.Dir, cmd.Stderr = dir, os.Stderr
	out, err := cmd.Output()
	if err != nil {
		return "", fmt.Errorf("%s: %w", strings.Join(arguments, " "), err)
	}
	return strings.TrimSpace(string(out)), nil
}

// covered returns the files of the module that the profile says were run. Helpers of tests aren't
// the plugin's.
func covered(profile, module string) ([]string, error) {
	profiles, err := cover.ParseProfiles(profile)
	if err != nil {
		return nil, fmt.Errorf("read the coverage: %w", err)
	}
	var files []string
	for _, p := range profiles {
		name := strings.TrimPrefix(p.FileName, module+"/")
		runs := slices.ContainsFunc(p.Blocks, func(b cover.ProfileBlock) bool { return b.Count > 0 })
		if runs && !strings.HasPrefix(name, "hack/") && !helpsTests(path.Dir(name)) {
			files = append(files, name)
		}
	}
	slices.Sort(files)
	return files, nil
}
