// Search runs in a worker. Browsers start none for a page that was opened as a file: a frame takes its place.
class FrameWorker extends EventTarget {
  constructor(url) {
    super();
    const frame = document.createElement("iframe");
    frame.hidden = true;
    document.body.append(frame);
    this.inner = frame.contentWindow;
    this.inner.postMessage = data => this.dispatchEvent(new MessageEvent("message", {data}));
    const script = this.inner.document.createElement("script");
    this.loaded = new Promise(done => { script.onload = done; });
    script.src = url;
    this.inner.document.body.append(script);
  }
  postMessage(data) {
    this.loaded.then(() => this.inner.dispatchEvent(new MessageEvent("message", {data})));
  }
}
if (location.protocol === "file:") window.Worker = FrameWorker;
