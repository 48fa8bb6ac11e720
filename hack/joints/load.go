package main

import (
	"errors"
	"fmt"
	"go/ast"
	"path"
	"slices"
	"strings"

	"golang.org/x/tools/go/packages"
)

// plugin is the program whose locks and goroutines are counted.
const plugin = "kubelet-plugin"

// daemons returns the programs that run in a cluster. What ships is these and the kubectl plugin.
func daemons() []string { return []string{"controller", plugin, "mps-supervisor"} }

func programs() []string { return append(daemons(), "kubectl-gpu") }

// tree is the code that ships, by the programs that it is in.
type tree struct {
	root     string                       // what the import paths of the project begin with
	packages map[string]*packages.Package // by import path
	of       map[string][]string          // import paths, by program
}

// load reads the code behind the programs in cmd/ of dir: the project's own, without tests, helpers
// of tests and generated files.
func load(dir string) (*tree, error) {
	var patterns []string
	for _, program := range programs() {
		patterns = append(patterns, "./cmd/"+program)
	}
	found, err := loadPackages(dir, packages.NeedName|packages.NeedImports|packages.NeedDeps, patterns)
	if err != nil {
		return nil, err
	}
	t := &tree{packages: map[string]*packages.Package{}, of: map[string][]string{}}
	var paths []string
	for _, p := range found {
		program := path.Base(p.PkgPath)
		t.root = strings.TrimSuffix(p.PkgPath, "cmd/"+program)
		packages.Visit([]*packages.Package{p}, nil, func(dep *packages.Package) {
			if strings.HasPrefix(dep.PkgPath, t.root) && !helpsTests(dep.PkgPath) {
				t.of[program] = append(t.of[program], dep.PkgPath)
			}
		})
		paths = append(paths, t.of[program]...)
	}
	slices.Sort(paths)
	found, err = loadPackages(dir, packages.LoadSyntax, slices.Compact(paths))
	if err != nil {
		return nil, err
	}
	for _, p := range found {
		p.Syntax = slices.DeleteFunc(p.Syntax, ast.IsGenerated)
		t.packages[p.PkgPath] = p
	}
	return t, nil
}

// helpsTests reports whether a package's name says that it is for tests.
func helpsTests(importPath string) bool { return strings.HasSuffix(importPath, "test") }

func loadPackages(dir string, mode packages.LoadMode, patterns []string) ([]*packages.Package, error) {
	found, err := packages.Load(&packages.Config{Mode: mode, Dir: dir}, patterns...)
	if err != nil {
		return nil, fmt.Errorf("load the packages of %s: %w", dir, err)
	}
	var errs []error
	for _, p := range found {
		for _, err := range p.Errors {
			errs = append(errs, err)
		}
	}
	return found, errors.Join(errs...)
}

// behind returns the packages of the programs, each once, in order.
func (t *tree) behind(programs ...string) []*packages.Package {
	var paths []string
	for _, program := range programs {
		paths = append(paths, t.of[program]...)
	}
	slices.Sort(paths)
	var all []*packages.Package
	for _, p := range slices.Compact(paths) {
		all = append(all, t.packages[p])
	}
	return all
}

// below returns what ships of a directory and of those in it.
func (t *tree) below(dir string) []*packages.Package {
	return slices.DeleteFunc(t.behind(programs()...), func(p *packages.Package) bool {
		return !strings.HasPrefix(p.PkgPath+"/", t.root+dir+"/")
	})
}
