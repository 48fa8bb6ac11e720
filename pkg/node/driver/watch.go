package driver

import (
	"context"
	"errors"
	"path/filepath"
	"strings"
	"sync"
	"time"

	"github.com/fsnotify/fsnotify"
	"k8s.io/client-go/util/flowcontrol"
	"k8s.io/klog/v2"

	"github.com/tessera-dra/tessera/pkg/driverroot"
	"github.com/tessera-dra/tessera/pkg/nvml"
)

// watch requests readings when GPUs, or their device nodes, may have changed. The
// function that is returned ends that, and returns when the session isn't used any
// more.
func (f *Follower) watch(ctx context.Context, root driverroot.Root, session *nvml.Session) (end func()) {
	ctx, cancel := context.WithCancel(ctx)
	ended := []<-chan struct{}{f.watchEvents(ctx, session), f.watchNodes(ctx, root)}
	return func() {
		cancel()
		for _, done := range ended {
			<-done
		}
	}
}

// watchEvents passes each event to the health monitor, and requests a reading two seconds later. The
// channel is closed when the session isn't used any more.
func (f *Follower) watchEvents(ctx context.Context, session *nvml.Session) <-chan struct{} {
	ctx, done := f.listening.begin(ctx)
	go func() {
		defer close(done)
		failures := flowcontrol.NewBackOff(retryDriver, rereadEvery) // each requests a reading
		for ctx.Err() == nil {
			event, err := session.WaitEvent(ctx)
			switch {
			case err == nil:
				failures.Reset(f.cfg.NodeName)
				f.cfg.Health.Saw(event)
				f.cfg.Facts.RereadSoon()
				continue
			case ctx.Err() != nil:
				return
			case errors.Is(err, nvml.ErrNotSupported):
				klog.FromContext(ctx).V(2).Info("GPUs have no events to watch, facts are read from time to time", "node", f.cfg.NodeName, "err", err)
				return
			default: // such as a GPU that is lost
				klog.FromContext(ctx).V(2).Info("Waiting for GPU events", "node", f.cfg.NodeName, "err", err)
				failures.Next(f.cfg.NodeName, time.Now())
				select {
				case <-time.After(failures.Get(f.cfg.NodeName)):
				case <-ctx.Done():
				}
			}
			f.cfg.Facts.RereadGPUs()
		}
	}()
	return done
}

// listening ends the wait for events before the Follower's other work ends.
type listening struct {
	mu      sync.Mutex
	stopped bool
	cancel  context.CancelFunc
	done    <-chan struct{}
}

// begin returns a context that ends with stop. The caller waits for events until then, and
// closes the channel when it waits no more.
func (l *listening) begin(ctx context.Context) (context.Context, chan struct{}) {
	l.mu.Lock()
	defer l.mu.Unlock()
	done := make(chan struct{})
	ctx, l.cancel = context.WithCancel(ctx)
	l.done = done
	if l.stopped {
		l.cancel()
	}
	return ctx, done
}

// stop ends the wait for events, also a later one, and returns when it has ended or ctx has.
func (l *listening) stop(ctx context.Context) {
	l.mu.Lock()
	l.stopped = true
	done := l.done
	if done != nil {
		l.cancel()
	}
	l.mu.Unlock()
	if done == nil {
		return
	}
	select {
	case <-done:
	case <-ctx.Done():
	}
}

// watchNodes requests a reading when device nodes appear or disappear.
func (f *Follower) watchNodes(ctx context.Context, root driverroot.Root) <-chan struct{} {
	done := make(chan struct{})
	watcher, err := fsnotify.NewWatcher()
	if err == nil {
		err = watcher.Add(f.cfg.Opener.host.Path(filepath.Join(root.DevRoot, "dev")))
	}
	if err != nil {
		klog.FromContext(ctx).Info("Device nodes are not watched, only looked at from time to time", "node", f.cfg.NodeName, "err", err)
		if watcher != nil {
			watcher.Close()
		}
		close(done)
		return done
	}
	go func() {
		defer close(done)
		defer watcher.Close()
		for {
			select {
			case <-ctx.Done():
				return
			case err := <-watcher.Errors:
				klog.FromContext(ctx).Info("Changes of device nodes may have been missed, reading them again", "err", err)
				f.cfg.Facts.Reread()
			case event := <-watcher.Events:
				if strings.HasPrefix(filepath.Base(event.Name), "nvidia") && event.Op&(fsnotify.Create|fsnotify.Remove|fsnotify.Rename) != 0 {
					f.cfg.Facts.Reread()
				}
			}
		}
	}()
	return done
}
