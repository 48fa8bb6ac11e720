package containers

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"
	"k8s.io/dynamic-resource-allocation/kubeletplugin"

	"github.com/tessera-dra/tessera/pkg/kubepods"
)

// emptyEvery is the interval of checks of a pod's cgroup. Version 1 of cgroups
// reports no change; with version 2 a report ends the pause.
const emptyEvery = 100 * time.Millisecond

// kubepodsDepth is the maximum depth of the search for the cgroup of all pods:
// it is not at the top if the kubelet runs in a container.
const kubepodsDepth = 6

// cgroups finds the cgroups of pods.
type cgroups struct {
	// root is the path of the host's cgroup file systems.
	root string

	pods atomic.Pointer[[]string] // cgroups that contain all pods, as they were last found
}

// waitEmpty waits until no process is in the pods' cgroups.
func (g *cgroups) waitEmpty(ctx context.Context, e *events, pods []kubeletplugin.NamespacedObject) error {
	for _, p := range pods {
		for {
			file, populated, err := g.populated(string(p.UID))
			if err != nil {
				return err
			}
			if !populated {
				break
			}
			if err := g.waitChange(ctx, e, file, string(p.UID)); err != nil {
				return err
			}
		}
	}
	return nil
}

// waitChange waits until the file may have changed since it was read.
func (g *cgroups) waitChange(ctx context.Context, e *events, file, podUID string) error {
	w, err := e.watch(file, unix.IN_MODIFY)
	if err != nil { // no watch is available, or the cgroup is gone
		return pause(ctx, nil, emptyEvery)
	}
	defer e.remove(w)
	if _, populated, err := g.populated(podUID); err != nil || !populated {
		return err
	}
	return pause(ctx, w.done, emptyEvery)
}

// populated reports whether a process is in the cgroup of a pod or below it,
// and returns the file that shows it.
func (g *cgroups) populated(podUID string) (string, bool, error) {
	tops, err := g.tops()
	if err != nil {
		return "", false, err
	}
	for _, top := range tops {
		for _, dir := range kubepods.Dirs(top, podUID) {
			file, populated, err := readPopulated(dir)
			if populated || err != nil {
				return file, populated, err
			}
		}
	}
	return "", false, nil
}

// readPopulated reads version 2's cgroup.events, or version 1's pids.current, both
// of which include child cgroups. A cgroup that is gone is empty.
func readPopulated(dir string) (string, bool, error) {
	for file, populated := range map[string]func(string) bool{
		"cgroup.events": func(text string) bool { return strings.Contains(text, "populated 1") },
		"pids.current":  func(text string) bool { return strings.TrimSpace(text) != "0" },
	} {
		path := filepath.Join(dir, file)
		data, err := os.ReadFile(path)
		switch {
		case errors.Is(err, fs.ErrNotExist), errors.Is(err, unix.ENODEV):
		case err != nil:
			return path, false, fmt.Errorf("read whether a pod's cgroup is empty: %w", err)
		case populated(string(data)):
			return path, true, nil
		}
	}
	return "", false, nil
}

// tops returns the cgroups that contain all pods. It searches again if there is
// none, or one is gone.
func (g *cgroups) tops() ([]string, error) {
	isGone := func(dir string) bool {
		_, err := os.Stat(dir)
		return err != nil
	}
	if known := g.pods.Load(); known != nil && len(*known) > 0 && !slices.ContainsFunc(*known, isGone) {
		return *known, nil
	}
	found, err := findTops(g.hierarchy())
	g.pods.Store(&found)
	return found, err
}

// hierarchy returns the cgroup tree to read: the one of version 2, or that of
// version 1's pids controller.
func (g *cgroups) hierarchy() string {
	if _, err := os.Stat(filepath.Join(g.root, "cgroup.controllers")); err == nil {
		return g.root
	}
	return filepath.Join(g.root, "pids")
}

func findTops(root string) ([]string, error) {
	var found []string
	err := filepath.WalkDir(root, func(path string, entry fs.DirEntry, err error) error {
		switch {
		case errors.Is(err, fs.ErrNotExist), errors.Is(err, unix.ENODEV):
			return nil // removed in the meantime
		case err != nil:
			return err
		case !entry.IsDir():
			return nil
		case kubepods.IsTop(entry.Name()):
			found = append(found, path)
			return fs.SkipDir
		case strings.Count(strings.TrimPrefix(path, root), "/") >= kubepodsDepth:
			return fs.SkipDir
		}
		return nil
	})
	if err != nil {
		return nil, fmt.Errorf("search for the cgroup of all pods: %w", err)
	}
	return found, nil
}
