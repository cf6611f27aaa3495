"""dummy"""
import numpy as np, torch
from functools import lru_cache
from dkcls.ops.deform_kernel import numba_kernels as K
from dkcls.ops.geometry import tap_grid
CL=torch.channels_last
def prep(x, weight, ko, io, g):
    n,c,h,w=x.shape
    ho,wo=g.output_size(h,w)
    if ko is None: B=weight.shape[0]; T=g.taps; sc=(1,1)
    else: B=1; sc=weight.shape[2:]; T=sc[0]*sc[1]
    o=2*g.taps; p=-(-o//8)*8
    cst=consts(tuple(g.kernel_size),tuple(sc),tuple(g.step),tuple(g.dilation))
    s=K.Sizes(n,c,h,w,ho,wo,*g.kernel_size,*g.stride,*g.padding,*g.dilation,*sc,B,T,o,p)
    return s,cst
@lru_cache
def consts(ks,sc,step,dil):
    taps=ks[0]*ks[1]; o=2*taps; p=-(-o//8)*8
    cst=np.zeros((4,p),np.float32)
    for a in range(2):
        grid=tap_grid(ks[a],sc[a],step[a])
        for k in range(taps):
            kk=divmod(k,ks[1])[a]
            cst[:,2*k+a]=grid[kk],sc[a]-1,max(sc[a]-2,0),kk*dil[a]
    return cst.ravel()
def off(o): return None if o is None else K.Offsets(o.data_ptr(),*o.stride())
def forward(x,weight,ko,io,g,par=False):
    s,cst=prep(x,weight,ko,io,g)
    x=x.contiguous(memory_format=CL); wt=weight.reshape(s.kernels,s.channels,s.entries).transpose(1,2).contiguous()
    out=torch.empty(s.images,s.channels,s.out_height,s.out_width,memory_format=CL)
    (K.forward_parallel if par else K.forward_serial)(s,x.data_ptr(),wt.data_ptr(),off(ko),off(io),cst.ctypes.data,out.data_ptr())
    return out
def backward(grad,x,weight,ko,io,g,needs,par=False):
    s,cst=prep(x,weight,ko,io,g)
    x=x.contiguous(memory_format=CL); wt=weight.reshape(s.kernels,s.channels,s.entries).transpose(1,2).contiguous(); grad=grad.contiguous(memory_format=CL)
    G=s.images
    sp=K.Split(G,1,s.channels)
    gxx=torch.empty_like(x,memory_format=CL); gw=torch.empty(G,s.entries,s.channels)
    mk=lambda o: None if o is None else torch.empty(sp.blocks,s.images,s.out_height,s.out_width,o.shape[1])
    gk,gi=mk(ko),mk(io)
    ad=lambda t:None if t is None else t.data_ptr()
    (K.backward_parallel if par else K.backward_serial)(s,sp,g.clip=='projected',x.data_ptr(),wt.data_ptr(),off(ko),off(io),cst.ctypes.data,grad.data_ptr(),ad(gxx),gw.data_ptr(),ad(gk),ad(gi))
    if s.kernels==1: gw=gw.sum(0,keepdim=True)
    return [gxx,gw.transpose(1,2).reshape(weight.shape),*(None if t is None else t[0].permute(0,3,1,2) for t in (gk,gi))]
